"""The full screen of `memledger watch` (Textual, extra `[tui]`). It draws what `memledger.watch.screen` says and asks for nothing.

The one timer takes the events that there are; whatever a driver or a server takes, the screen answers.
"""

from __future__ import annotations

import os
import time
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from memledger.sanitize import printable
from memledger.watch import screen
from memledger.watch.board import Board
from memledger.watch.feed import Feed
from memledger.watch.moment import Moment

SHAPES: Final = frozenset({"bold", "dim", "reverse", "underline"})
"""Looks that are no colours."""
LATE: Final = 3.0
"""A look is late when it is older than so many intervals, and this many seconds."""
HELP: Final = """\
q quit   space hold the picture   g or Tab other GPU   f findings in full
up/down scroll   ? or Escape without this help

Bars are shares of the card. `since the start` is what the server's process holds beyond its ledger: torch's allocator and \
libraries. Beside it stands how it moves: the slope with the interval that holds it 19 times in 20, or `flat`. A pool's own bar \
shows its use: what is reserved does not change."""


class WatchApp(App[int]):
    """The screen. `feed` is asked for events at each tick, `board` is fed with them."""

    CSS = """
    #body { padding: 0 1; }
    #held { height: auto; padding: 0 1; color: $warning; display: none; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "hold", "Hold"),
        Binding("g,tab,right", "next_gpu(1)", "GPU"),
        Binding("left", "next_gpu(-1)", "GPU before", show=False),
        Binding("f", "findings", "Findings"),
        Binding("question_mark", "explain_screen", "Help"),
        Binding("escape", "close_help", "Close", show=False),
    ]

    def __init__(self, feed: Feed, board: Board, interval_s: float) -> None:
        super().__init__()
        self._feed, self._board, self._interval_s = feed, board, interval_s
        self._held = False
        self._full = False
        self._help = False
        self._gpu = 0
        self._looked_at: float | None = None
        self._colours = not os.environ.get("NO_COLOR")

    def compose(self) -> ComposeResult:
        """One column that scrolls, and the keys."""
        with VerticalScroll():
            yield Static(id="held")
            yield Static(id="body")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.title = "memledger watch"
        self.query_one(VerticalScroll).focus()
        self.draw()
        self.set_interval(max(0.1, min(0.5, self._interval_s / 2)), self.tick)

    def on_resize(self) -> None:
        """The lines are made for the width."""
        self.draw()

    def tick(self) -> None:
        """Take what happened since the last tick; draw where that was something, or where the last look is late."""
        events = self._feed.events()
        for event in events:
            self._board.take(event)
        if any(isinstance(event, Moment) for event in events):
            self._looked_at = time.monotonic()
        if (events or self._age() is not None) and not self._held:
            self.draw()

    def draw(self) -> None:
        """The whole body anew: Textual sends the terminal only what differs."""
        width = max(40, self.size.width - 4)
        lines = screen.screen(self._board, width, gpu=self._gpu, full=self._full, now_age_s=self._age())
        text = Text("\n").join(_line(line, colours=self._colours) for line in lines)
        # A last tick may come while the screen is taken down: then there is no body any more.
        for body in self.query("#body").results(Static):
            body.update(Text(HELP + "\n\n") + text if self._help else text)

    def action_hold(self) -> None:
        """Hold the picture, or go on; samples are taken all the same."""
        self._held = not self._held
        held = self.query_one("#held", Static)
        held.update("held: space goes on" if self._held else "")
        held.display = self._held
        if not self._held:
            self.draw()

    def action_next_gpu(self, step: int) -> None:
        """Another GPU in full."""
        self._gpu = (self._gpu + step) % max(1, screen.gpu_count(self._board))
        self.draw()

    def action_findings(self) -> None:
        """All findings in full, or their heads."""
        self._full = not self._full
        self.draw()

    def action_explain_screen(self) -> None:
        """The keys, and what the figures are."""
        self._help = not self._help
        self.draw()

    def action_close_help(self) -> None:
        """Back to the figures alone."""
        self._help = False
        self.draw()

    def _age(self) -> float | None:
        """Seconds since the last look, where it is late and the server has not ended."""
        if self._looked_at is None or self._board.end is not None or self._feed.done:
            return None
        age = time.monotonic() - self._looked_at
        return age if age > max(LATE, LATE * self._interval_s) else None


def _line(line: screen.Line, *, colours: bool) -> Text:
    """A line in Textual's terms. Without colours a bar has the ink of the text: Textual would make greys of them, some too dark to see."""
    text = Text(no_wrap=True)
    for span in line:
        look = span.look if colours else " ".join(word for word in span.look.split() if word in SHAPES)
        text.append(printable(span.text), style=look)
    return text


def run(feed: Feed, board: Board, *, interval_s: float, no_color: bool) -> int:
    """Show the screen until the user quits; the exit code."""
    if no_color:
        os.environ["NO_COLOR"] = "1"  # Textual's own switch
    WatchApp(feed, board, interval_s).run()
    return 0
