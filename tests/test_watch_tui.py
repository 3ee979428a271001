"""The full screen, driven by Textual's pilot: sizes, keys, a server that ends, findings as they appear."""

import asyncio

import live_cases
import pytest
from textual.widgets import Static
from watch_cases import CASE, at, moment, start

from memledger.watch.board import Board
from memledger.watch.moment import End
from memledger.watch.tui import WatchApp


class GivenFeed:
    """Events that a test hands over."""

    done = False

    def __init__(self, *events):
        self.waiting = list(events)

    def events(self):
        waiting, self.waiting = self.waiting, []
        return waiting

    def close(self):
        pass


@pytest.fixture(scope="module")
def sample():
    return live_cases.sample(CASE)


def shown(app):
    return app.query_one("#body", Static).render().plain


def driven(feed, drive, size=(80, 24)):
    app = WatchApp(feed, Board(), 0.2)

    async def main():
        async with app.run_test(size=size) as pilot:
            await drive(app, pilot)

    asyncio.run(main())
    return app


async def until(pilot, condition):
    for _ in range(400):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 10)])
def test_no_line_is_wider_than_the_screen(sample, size):
    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        assert max(map(len, shown(app).splitlines())) <= size[0]

    driven(GivenFeed(start(), moment(sample, 0)), drive, size)


def test_the_screen_follows_the_terminals_size(sample):
    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        before = max(map(len, shown(app).splitlines()))
        await pilot.resize_terminal(200, 60)
        await until(pilot, lambda: max(map(len, shown(app).splitlines())) > before)

    driven(GivenFeed(start(), moment(sample, 0)), drive)


def test_findings_appear_while_it_is_watched(sample):
    feed = GivenFeed(start(), moment(sample, 0))

    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        assert "[ML010]" not in shown(app)
        feed.waiting = [moment(sample, i, own=i) for i in range(1, 600)]
        await until(pilot, lambda: "[ML010] memory grows at the same load" in shown(app))

    driven(feed, drive)


def test_a_server_that_dies_is_said_and_the_screen_stays(sample):
    feed = GivenFeed(start(), moment(sample, 0))

    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        feed.waiting = [End(at(5), "process 4242 ended")]
        await until(pilot, lambda: "ended 10:00:05: process 4242 ended" in shown(app))
        assert "KV cache" in shown(app)

    driven(feed, drive)


def test_a_look_that_is_late_is_said(sample):
    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        await until(pilot, lambda: "answers late" in shown(app))

    driven(GivenFeed(start(), moment(sample, 0)), drive)


def test_keys_hold_explain_tell_all_and_quit(sample):
    feed = GivenFeed(start(), moment(sample, 0))

    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        await pilot.press("f")
        await until(pilot, lambda: "[ML005]" in shown(app))
        await pilot.press("question_mark")
        await until(pilot, lambda: "hold the picture" in shown(app))
        await pilot.press("escape")
        await until(pilot, lambda: "hold the picture" not in shown(app))
        await pilot.press("space")
        held = shown(app)
        feed.waiting = [moment(sample, 1, running=77)]
        await until(pilot, lambda: not feed.waiting)
        await pilot.pause(0.3)
        assert shown(app) == held
        await pilot.press("space")
        await until(pilot, lambda: "77 running" in shown(app))
        await pilot.press("q")

    assert driven(feed, drive).return_code == 0


def test_before_the_first_look_the_screen_says_so():
    async def drive(app, pilot):
        await until(pilot, lambda: "nothing of a server was seen yet" in shown(app))

    driven(GivenFeed(), drive)


def test_a_tick_while_the_screen_is_taken_down_draws_nothing(sample):
    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        await app.query_one("#body").remove()
        app.draw()

    assert driven(GivenFeed(start(), moment(sample, 0)), drive).return_code in {0, None}


@pytest.mark.parametrize(("value", "coloured"), [("", True), ("1", False)])
def test_without_colours_bars_have_the_ink_of_the_text(sample, monkeypatch, value, coloured):
    monkeypatch.setenv("NO_COLOR", value)
    looks = set()

    async def drive(app, pilot):
        await until(pilot, lambda: "KV cache" in shown(app))
        looks.update(str(span.style) for span in app.query_one("#body", Static).content.spans)

    driven(GivenFeed(start(), moment(sample, 0)), drive)
    assert "bold" in looks
    assert bool(looks & {"blue", "green", "magenta", "red", "yellow"}) is coloured
