"""From the command line's file names to a report, with what could not be read said in words."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from memledger import pipeline
from memledger.conclude import complete
from memledger.grammar import GrammarError, RuleSet, load_rules
from memledger.ledger import Report
from memledger.sanitize import clean

if TYPE_CHECKING:
    from memledger.cards import Total
    from memledger.events import Event

SHOWS_PROGRESS_FROM: Final = 50 * 10**6
"""Bytes of an input from which a bar is worth its line (on a terminal only)."""


class ReadResult(msgspec.Struct, frozen=True):
    """A report, what could not be read (`problems`), and what to say where nothing was recognised (`nothing`).

    `heads`: how each input begins.
    """

    report: Report
    problems: tuple[str, ...] = ()
    nothing: tuple[str, ...] = ()
    heads: tuple[bytes, ...] = ()


def rules(files: Sequence[Path]) -> RuleSet:
    """The rules in force.

    Raises:
        click.UsageError: a rule file can't be used.
    """
    try:
        return load_rules(files)
    except GrammarError as error:
        raise click.UsageError(clean(str(error))) from error


def read(
    files: Sequence[str],
    rule_files: Sequence[Path],
    gpu_total: Total | None,
    on_news: Callable[[Report], None] | None = None,
    *,
    model_config: Path | None = None,
    look_here: bool = False,
    tap: Callable[[Event], None] | None = None,
) -> ReadResult:
    """Read every input that can be read, and explain it.

    `model_config` is the model's `config.json`, where the user gave it; `look_here`: whether this machine may be looked at
    for it otherwise. `tap` is shown every event. With `on_news` the input is followed as it grows: it is called with each new report until the user ends it.
    """
    in_force = rules(rule_files)
    refused = _unusable(model_config)
    bar = ProgressBar() if sys.stderr is not None and sys.stderr.isatty() and on_news is None else None

    def on_idle(report: Report) -> bool:
        if on_news is not None:
            on_news(complete(report, gpu_total, model_config, look_here=look_here, refused=refused))
        return True

    try:
        if on_news is None:
            got = pipeline.read(files, in_force, progress=bar, tap=tap, cores=None)
        else:
            with interrupted() as ended:
                got = pipeline.read(files, in_force, on_idle=on_idle, ended=ended, tap=tap)
    finally:
        if bar is not None:
            bar.finish()
    problems = tuple(clean(problem) for problem in (*got.problems, *([refused] if refused else ())))
    report = complete(got.report, gpu_total, model_config, look_here=look_here, refused=refused)
    return ReadResult(report, problems, nothing_recognised(got), got.heads)


@contextlib.contextmanager
def interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came: the first one asks for an end with a report, the second one ends at once."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def take(number: int, _: FrameType | None) -> None:
        came.append(number)
        restore()

    for number in before:
        signal.signal(number, take)
    try:
        yield lambda: bool(came)
    finally:
        restore()


def _unusable(model_config: Path | None) -> str | None:
    """Why the model's config that the user named can't be used; None where it can, or where none was named."""
    if model_config is None:
        return None
    from memledger.model.find import ModelConfigError, find

    try:
        find(None, config=model_config)
    except ModelConfigError as error:
        return f"--model-config: {error}"
    return None


def nothing_recognised(got: pipeline.Reading) -> tuple[str, ...]:
    """What to say where no server was found: what each input seems to be, and what was looked for."""
    if got.report.servers:
        return ()
    from memledger.lookalike import LOOKED_FOR, describe

    sentences = []
    for item, head in zip(got.report.inputs, got.heads, strict=True):
        name = "standard input" if item.path == "-" else clean(item.path)
        sentences.append(f"{name}: nothing of SGLang or vLLM in it; it looks like {describe(head, item.bytes)}.")
        sentences += [clean(note) for note in item.notes]
    return (*sentences, f"Looked for {'; '.join(LOOKED_FOR)}.")


class ProgressBar:
    """A bar on stderr for large inputs; told the bytes read so far and the input's size."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._done = 0

    def __call__(self, done: int, size: int | None) -> None:
        """One more block was read."""
        if size is None or size < SHOWS_PROGRESS_FROM:
            return
        if self._bar is None or done < self._done:
            self.finish()
            self._bar = click.progressbar(length=size, label="reading", file=sys.stderr, update_min_steps=size // 200)
            self._bar.render_progress()
            self._done = 0
        self._bar.update(done - self._done)
        self._done = done

    def finish(self) -> None:
        """End the bar's line, where there is one."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
