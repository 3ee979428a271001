"""ML801 to ML804: what options cost: speculative decoding, a draft inside another figure, LoRA, request tables."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.findings.figures import (
    NO_CONTEXT,
    WORTH_SAYING,
    Context,
    each,
    held,
    largest,
    lines,
    of_card,
    share,
    whole,
)
from memledger.ledger import Effect, Finding, Remedy, Server, Severity
from memledger.units import GIB

SPECULATIVE: Final = {
    "weights/draft": "draft weights",
    "kv_cache/draft": "the draft's KV cache",
    "recurrent_state/speculative_conv": "speculative conv states",
    "recurrent_state/speculative_ssm": "speculative ssm states",
    "cuda_graphs/draft": "the draft's CUDA graphs",
}
LARGE_SHARE: Final = 0.05


def speculation(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML801: all that speculative decoding takes, where the log names it apart."""
    best = max(server.ranks, key=lambda r: sum(held(r, a) for a in SPECULATIVE), default=None)
    if best is None:
        return None
    parts = {name: size for account, name in SPECULATIVE.items() if (size := held(best, account)) > 0}
    size = sum(parts.values())
    if size < WORTH_SAYING:
        return None
    named = ", ".join(f"{name} {n.gib_about(part)}" for name, part in sorted(parts.items(), key=lambda i: -i[1]))
    tokens = whole(server.config.get("speculative_draft_tokens"))
    drafts = f" ({n.count(tokens)} draft tokens)" if tokens is not None else ""
    text = f"Speculative decoding{drafts} takes {n.gib_about(size)}{each(server)}{of_card(best, size)}: {named}."
    if any(account.startswith("recurrent_state") for account in SPECULATIVE if held(best, account)):
        text += " Its states go by running requests x draft tokens."
    severity: Severity = "note" if share(best, size) >= LARGE_SHARE else "info"
    return Finding("ML801", "share of speculative decoding", severity, size, text, lines(best, *SPECULATIVE))


def draft_inside(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML802: a draft model is inside the weights figure; only its size on disk is printed."""
    rank = next(
        (r for r in server.ranks for e in r.entries if e.account == "weights/model" and e.detail.get("includes_draft")),
        None,
    )
    if rank is None:
        return None
    weights, disk = held(rank, "weights/model"), whole(server.config.get("draft_checkpoint_bytes"))
    text = f"The {n.gib_about(weights)} of weights{each(server)} contain a draft model, which the engine does not print apart"
    if disk is not None:
        text += f"; its files are {n.gib_about(disk)}"
    text += ". Its KV cache is in the pool, its graphs in the graphs' figure."
    severity: Severity = "note" if disk is not None and disk >= weights // 10 else "info"
    return Finding("ML802", "draft model inside the weights", severity, disk or 0, text, lines(rank, "weights"))


def lora(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML803: what LoRA adapters take, or that it is inside the weights figure."""
    found = largest(server.ranks, "weights/lora")
    if found is not None and found[1] >= WORTH_SAYING:
        rank, size = found
        text = f"LoRA adapters take {n.gib_about(size)}{each(server)}{of_card(rank, size)}."
        severity: Severity = "note" if share(rank, size) >= LARGE_SHARE else "info"
        return Finding("ML803", "share of LoRA", severity, size, text, lines(rank, "weights/lora"))
    if server.framework == "vllm" and server.config.get("enable_lora") is True:
        found = largest(server.ranks, "weights")
        if found is not None:
            rank, weights = found
            slots, width = whole(server.config.get("max_loras")), whole(server.config.get("max_lora_rank"))
            sized = [f"{n.count(slots)} slots"] if slots else []
            sized += [f"rank {n.count(width)}"] if width else []
            room = f" ({', '.join(sized)})" if sized else ""
            text = (
                f"Buffers for LoRA adapters{room} are inside the {n.gib_about(weights)} of weights, not printed apart."
            )
            return Finding("ML803", "share of LoRA", "info", 0, text, lines(rank, "weights"))
    return None


def request_table(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML804: the table of request to token indices is GiBs large: rows x context x 4 bytes, printed nowhere."""
    found = largest(server.ranks, "request_tables")
    if found is None:
        return None
    rank, size = found
    cap, length = rank.capacity.max_running_requests, whole(server.config.get("context_length"))
    if size < GIB or cap is None or length is None:
        return None
    text = (
        f"{n.gib_about(size)}{each(server)} is the table of {n.count(cap)} requests x {n.count(length)} tokens of context "
        "(4 bytes each), which no line prints."
    )
    peak = server.usage.peak_running_requests
    remedies: tuple[Remedy, ...] = ()
    if peak is not None and not (whole(server.config.get("dp_size")) or 1) > 1:
        wanted = max(16, 2 * peak)
        if wanted <= cap // 2:
            freed = round(size * (1 - (wanted + 1) / (cap + 1)))
            text += (
                f" At most {n.count(peak)} ran: --max-running-requests {wanted} makes it {n.amount(size - freed)}, "
                "the rest stays free."
            )
            remedies = (
                Remedy(
                    ("--max-running-requests", str(wanted)),
                    (Effect(account="request_tables", bytes=-freed), Effect(account="free", bytes=freed)),
                    f"derived: {cap - wanted} rows x {n.count(length)} x 4 bytes; graphs shrink as well",
                ),
            )
    return Finding("ML804", "large request table", "note", size, text, lines(rank, "request_tables"), remedies)
