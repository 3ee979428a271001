"""`memledger rules`: what is understood, as a list; and whether it still is."""

from __future__ import annotations

from pathlib import Path

import click

from memledger.cli import app, overview


@click.command("rules", short_help=overview.COMMANDS["rules"][1])
@click.option(
    "--framework",
    type=click.Choice(["sglang", "vllm", "any", "system"]),
    help="Rules of one engine only (any: torch and Python; system: the kernel, containers, the driver).",
)
@click.option("--check", is_flag=True, help="Run every sample of every rule; exit 1 where one is not read as it says.")
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    metavar="FILE",
    help="A rule file of your own, before the bundled ones. Repeatable.",
)
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to write the list.")
@click.pass_context
def command(ctx: click.Context, framework: str | None, check: bool, rule_files: tuple[str, ...], format_: str) -> None:
    """The log lines that are understood: each rule's id, engine, the versions it was seen in, and what the line means."""
    from memledger.cli import output, reading
    from memledger.sanitize import clean

    in_force = reading.rules([Path(f) for f in rule_files])
    if check:
        from memledger.prefix import check_samples
        from memledger.scan import check_rules

        problems = [*check_rules(in_force), *check_samples()]
        for problem in problems:
            app.say(clean(problem))
        samples = sum(len(rule.sample) for rule in in_force.rules)
        output.write(f"{len(in_force.rules)} rules, {samples} samples, {len(problems)} problems\n")
        ctx.exit(app.CONDITION_HOLDS if problems else app.DONE)
    chosen = [rule for rule in in_force.rules if framework in {None, rule.framework}]
    if format_ == "json":
        import msgspec

        fields = [
            {
                "id": r.full_id,
                "framework": r.framework,
                "kind": r.kind,
                "versions": r.versions,
                "means": r.means,
                "anchors": r.literals,
                "fields": r.fields,
            }
            for r in chosen
        ]
        document = {"schema": "memledger/1", "rules": fields}
        # Not cleaned: an anchor's blanks count. What hides in a rule file's text is replaced where it is written.
        output.write(msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
        return
    from tabulate import tabulate

    rows = [tuple(clean(word) for word in (r.full_id, r.kind, r.versions, r.means)) for r in chosen]
    text = tabulate(rows, headers=("rule", "kind", "versions", "means"), tablefmt="plain", disable_numparse=True)
    output.write("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
