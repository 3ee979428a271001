"""A sweep as it runs: step after step, requests one after another in each of a step's places, looks at the server beside them.

Everything that is learnt is an event, given away as it comes; the figures are made of the events alone (`judge`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from memledger.sweep import client as sending
from memledger.sweep import server as asking
from memledger.sweep.figures import quantile
from memledger.sweep.machine import Machine
from memledger.sweep.prompts import IdPrompts, PromptError, TextPrompts, next_guess
from memledger.sweep.steps import Purse, Step, steps
from memledger.sweep.values import (
    Ended,
    Event,
    Look,
    Looked,
    Memory,
    NotRun,
    Outcome,
    Phase,
    Sent,
    Settings,
    StepBegun,
    StepEnded,
    Target,
)

if TYPE_CHECKING:
    import httpx

LOOK_EVERY_S: Final = 1.0
MOST_GUESSES: Final = 6
"""Requests of one token that finding a prompt's length by usage figures may cost, for each context."""
_LAG_EVERY_S: Final = 0.02
_TURN_S: Final = 0.0005
SETTLES_WITHIN_S: Final = 5.0
"""After a step the server's counters may come a moment later than its answers: they are asked until they have caught up."""


class Stop(Exception):  # noqa: N818
    """The run ends here; a sentence."""

    def __init__(self, reason: str, *, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.interrupted = reason, interrupted


class Plan(msgspec.Struct, frozen=True):
    """What a run needs beside its settings. `within_s`: the deadline of one request."""

    settings: Settings
    target: Target
    within_s: float = 600.0
    look_every_s: float = LOOK_EVERY_S


class Runner:
    """One run. `tell` gets every event; `say` gets progress in words."""

    def __init__(
        self,
        plan: Plan,
        client: httpx.AsyncClient,
        prompts: IdPrompts | TextPrompts,
        *,
        tell: Callable[[Event], None],
        say: Callable[[str], None],
        machine: Machine | None = None,
        clock: sending.Clock = time.perf_counter,
    ) -> None:
        self._plan, self._settings = plan, plan.settings
        self._client, self._prompts, self._machine = client, prompts, machine
        self._tell, self._say, self._clock = tell, say, clock
        self._began = clock()
        self._purse = Purse(self._settings.most_tokens)
        self._interrupted = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._in_step = False
        self._low: str | None = None
        self._least_free: int | None = None
        self._free_seen: list[tuple[int, int]] = []

    def interrupt(self) -> None:
        """End the run: what runs is cancelled, what was measured stays."""
        self._interrupted.set()
        if self._main is not None and not self._in_step:
            self._main.cancel()

    async def run(self) -> Ended:
        """All steps, then the soak; the last event, which says why it ended."""
        # The machine is looked at in a thread: with Python's 5 ms a turn, its work would come out in the measured times.
        turn = sys.getswitchinterval()
        sys.setswitchinterval(_TURN_S)
        try:
            return await self._run()
        finally:
            sys.setswitchinterval(turn)

    async def _run(self) -> Ended:
        self._main = asyncio.ensure_future(self._all())
        reason, interrupted = None, False
        try:
            await self._main
        except Stop as stop:
            reason, interrupted = stop.reason, stop.interrupted
        except PromptError as error:
            reason = str(error)
        except asyncio.CancelledError:
            if not self._interrupted.is_set():
                raise
            reason, interrupted = "interrupted", True
        ended = Ended(_now(), reason, interrupted)
        self._tell(ended)
        return ended

    async def _all(self) -> None:
        await self._warm_up()
        await self._steps()
        if self._settings.soak_s is not None:
            await self._soak(self._settings.soak_s)

    async def _steps(self) -> None:
        for step in steps(self._settings.contexts, self._settings.concurrency):
            if why := self._not_now(step):
                self._tell(NotRun(step, why))
                self._say(f"{step.name}: not run, {why}")
                continue
            failed = await self._step(step, self._settings.duration_s, self._settings.requests)
            if failed is not None:
                raise Stop(failed)

    async def _soak(self, length: float) -> None:
        largest = steps(self._settings.contexts, self._settings.concurrency)[-1]
        failed = await self._step(largest, length, None, soak=True)
        if failed is not None:
            raise Stop(failed)

    def _not_now(self, step: Step) -> str | None:
        """Why a step is not begun: the server takes no such length, or memory would fall below the floor."""
        longest, needed = self._plan.target.longest, step.context + self._settings.output_tokens
        if longest is not None and needed > longest:
            return f"the server takes {longest:,} tokens at most, prompt and answer together; this needs {needed:,}"
        if self._settings.to_failure or not self._settings.memory_floor_bytes:
            return None
        expected = expected_free(self._free_seen, step.context * step.concurrency)
        if expected is not None and expected < self._settings.memory_floor_bytes:
            return (
                f"by the steps before, {expected / 2**30:.2f} GiB would stay free, below the floor of "
                f"{self._settings.memory_floor_bytes / 2**30:.2f} GiB (--to-failure goes on)"
            )
        return None

    # --------------------------------------------------------------------------------------------------------- a step

    async def _warm_up(self) -> None:
        """One request, so that no step pays for what the server does once; and whether it answers at all."""
        shortest = min(self._settings.contexts)
        await self._learn_length(shortest)
        outcome = await self._one(shortest, min(self._settings.output_tokens, 16), warm_up=True)
        if outcome.error is not None:
            raise Stop(f"the first request failed: {outcome.reason}")
        self._check_length(shortest, outcome)

    def _check_length(self, tokens: int, outcome: Outcome) -> None:
        if isinstance(self._prompts, IdPrompts) and outcome.prompt_tokens not in {None, tokens}:
            raise Stop(
                f"the server counts {outcome.prompt_tokens} tokens in a prompt of {tokens} token ids: "
                "prompts of exact length can't be made for it"
            )

    async def _step(self, step: Step, duration_s: float, requests: int | None, *, soak: bool = False) -> str | None:
        """Run one step; why the run must end with it, or None."""
        await self._learn_length(step.context)
        self._tell(StepBegun(step, self._now(), soak))
        self._say(f"{step.name}: {'soak' if soak else 'step'} begins")
        if self._settings.shared_prefix:
            await self._one(step.context, 1, warm_up=True)
        self._least_free = None
        before = await self._look("before")
        state = _StepState(requests, self._now() + duration_s)
        self._in_step = True
        stopped = await self._work(step, state)
        await self._settle(before, state.done)
        self._in_step = False
        if self._least_free is not None:
            self._free_seen.append((step.context * step.concurrency, self._least_free))
        self._tell(StepEnded(self._now(), stopped, _p99(state.lags)))
        self._say(f"{step.name}: {state.done} requests done" + (f", {stopped}" if stopped else ""))
        if self._interrupted.is_set():
            raise Stop("interrupted", interrupted=True)
        if state.failed is not None:
            return f"{step.name} failed: {state.failed}"
        return stopped

    async def _work(self, step: Step, state: _StepState) -> str | None:
        """All places of a step until it is done; the reason where it was broken off."""
        places = [asyncio.ensure_future(self._place(step, state)) for _ in range(step.concurrency)]
        beside = [asyncio.ensure_future(self._looks(state)), asyncio.ensure_future(_lag(state.lags, self._clock))]
        stops = asyncio.ensure_future(self._stopped(state))
        try:
            working = asyncio.gather(*places)
            both: list[asyncio.Future[Any]] = [working, stops]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            reason = stops.result() if stops.done() else None
            if working.done():
                working.result()  # an error of our own is not hidden
        finally:
            for task in (*places, *beside, stops):
                task.cancel()
            ended = await asyncio.gather(working, *places, *beside, stops, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem
        return state.stopped or reason

    async def _stopped(self, state: _StepState) -> str:
        """Returns once the step must be broken off, with the reason."""
        left = self._settings.most_seconds - self._now()
        waiting = asyncio.ensure_future(self._interrupted.wait())
        low = asyncio.ensure_future(state.low.wait())
        try:
            done, _ = await asyncio.wait([waiting, low], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            low.cancel()
        if waiting in done:
            return "interrupted"
        if low in done and self._low is not None:
            return self._low
        return f"the time of {self._settings.most_seconds:g} s is over (--max-time)"

    async def _place(self, step: Step, state: _StepState) -> None:
        """One request after another until the step is over."""
        while state.more(self._now()):
            needed = step.context + self._settings.output_tokens
            if not self._purse.take(needed):
                state.stop(f"the next request could pass {self._purse.most:,} tokens (--max-tokens)")
                return
            state.begun += 1
            outcome = await self._one(step.context, self._settings.output_tokens, taken=needed)
            state.done += outcome.error is None
            if outcome.error is not None:
                state.fail(outcome.reason or outcome.error)

    async def _one(self, context: int, output: int, *, warm_up: bool = False, taken: int | None = None) -> Outcome:
        """Send one request and tell of it, even where it is cancelled."""
        if taken is None:
            taken = context + output
            if not self._purse.take(taken):
                raise Stop(f"the next request could pass {self._purse.most:,} tokens (--max-tokens)")
        prompt = self._prompts.make(context)
        return await self._send(prompt, output, taken, warm_up=warm_up)

    async def _send(self, prompt: str | list[int], output: int, taken: int, *, warm_up: bool) -> Outcome:
        target = self._plan.target
        said = sending.body(target.model, prompt, output, engine=target.framework is not None)
        sent = self._clock()
        used: int | None = None
        try:
            outcome = await sending.complete(
                self._client, said, within_s=self._plan.within_s, began=self._began, clock=self._clock
            )
            if outcome.prompt_tokens is not None and outcome.output_tokens is not None:
                used = outcome.prompt_tokens + outcome.output_tokens
        except asyncio.CancelledError:
            outcome = Outcome(sent - self._began, self._clock() - sent, error="cancelled", reason="the step was ended")
            self._tell(Sent(outcome, warm_up))
            raise
        finally:
            self._purse.settle(taken, used)
        self._tell(Sent(outcome, warm_up))
        return outcome

    # ------------------------------------------------------------------------------------------- prompts by usage figures

    async def _learn_length(self, tokens: int) -> None:
        """For a server without a tokenizer endpoint: find the words that make so many tokens, by asking for one token each time."""
        if not isinstance(self._prompts, TextPrompts):
            return
        tried: list[tuple[int, int]] = []
        while len(tried) < MOST_GUESSES and (words := next_guess(tokens, tried)) is not None:
            taken = max(words, tokens) * 4 + 1  # of a text's length nothing is known before it is counted
            if not self._purse.take(taken):
                raise Stop(f"the next request could pass {self._purse.most:,} tokens (--max-tokens)")
            outcome = await self._send(self._prompts.of_words(words), 1, taken, warm_up=True)
            if outcome.error is not None:
                raise Stop(f"a prompt of {words:,} words failed: {outcome.reason}")
            if outcome.prompt_tokens is None:
                raise Stop("the server has no /tokenize and says no usage: the length of a prompt can't be known")
            tried.append((words, outcome.prompt_tokens))
        self._prompts.learn(tokens, min(tried, key=lambda one: abs(one[1] - tokens))[0])

    # ---------------------------------------------------------------------------------------------------------- looking

    async def _looks(self, state: _StepState) -> None:
        while True:
            await asyncio.sleep(self._plan.look_every_s)
            look = await self._look("during")
            self._check_floor(look, state)

    def _check_floor(self, look: Look, state: _StepState) -> None:
        if self._settings.to_failure or look.memory is None:
            return
        why = below_floor(look, self._settings.memory_floor_bytes)
        if why is not None:
            self._low = why
            state.low.set()

    async def _look(self, phase: Phase) -> Look:
        """The server's page and the machine, at the same time; the machine in a thread, for the driver may take its time."""
        counters, memory = await asyncio.gather(asking.counters(self._client), self._memory(phase))
        look = Look(phase, round(self._now(), 3), _now(), counters.metrics, counters.totals, memory)
        self._tell(Looked(look))
        if memory is not None and memory.free_bytes is not None:
            self._least_free = min(memory.free_bytes, self._least_free or memory.free_bytes)
        return look

    async def _memory(self, phase: Phase) -> Memory | None:
        if self._machine is None:
            return None
        return await asyncio.to_thread(self._machine.memory, accounts=phase != "during")

    async def _settle(self, before: Look, done: int) -> None:
        """The look after a step: as soon as the server has counted what it answered, or when it has had time enough."""
        ends = self._clock() + SETTLES_WITHIN_S
        while not self._interrupted.is_set() and self._clock() < ends:
            found = await asking.counters(self._client)
            if found.totals is None or before.totals is None or found.metrics is None:
                break
            counted = found.totals.since(before.totals).requests
            busy = found.metrics.running_requests or found.metrics.queued_requests
            if not busy and (counted is None or counted >= done):
                break
            await asyncio.sleep(0.1)
        await self._look("after")

    def _now(self) -> float:
        return self._clock() - self._began


class _StepState:
    """How far a step is: its places share it."""

    def __init__(self, requests: int | None, ends: float) -> None:
        self._requests, self._ends = requests, ends
        self.begun = self.done = 0
        self.stopped: str | None = None
        self.failed: str | None = None
        self.low = asyncio.Event()
        self.lags: list[float] = []

    def more(self, now: float) -> bool:
        """Whether a place sends another request."""
        if self.stopped is not None or self.failed is not None:
            return False
        return self.begun < self._requests if self._requests is not None else now < self._ends

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def fail(self, reason: str) -> None:
        self.failed = self.failed or reason


def below_floor(look: Look, floor: int) -> str | None:
    """Why memory is too low to go on: a device's below the floor, or, of a server without one, the host's."""
    memory = look.memory
    if memory is None:
        return None
    if memory.free_bytes is not None and floor and memory.free_bytes < floor:
        return f"{memory.free_bytes / 2**30:.2f} GiB free on a device, below the floor of {floor / 2**30:.2f} GiB"
    host = memory.host_available_bytes
    if host is not None and floor and memory.free_bytes is None and host < floor:
        return f"{host / 2**30:.2f} GiB of host memory left, below the floor of {floor / 2**30:.2f} GiB"
    return None


def expected_free(seen: list[tuple[int, int]], load: int) -> int | None:
    """Free memory to expect under a load (tokens at once), from (load, least free) of the steps before.

    The line through the two largest loads, never upwards; None of fewer than two different loads.
    """
    known: dict[int, int] = {}
    for tokens, free in seen:
        known[tokens] = min(free, known.get(tokens, free))
    if len(known) < 2:
        return None
    (first, free_first), (last, free_last) = sorted(known.items())[-2:]
    slope = min(0.0, (free_last - free_first) / (last - first))
    return int(free_last + slope * max(0, load - last))


async def _lag(lags: list[float], clock: sending.Clock) -> None:
    """How late this program itself comes to what is due."""
    while True:
        due = clock() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append(max(0.0, clock() - due))
        if len(lags) > 200_000:
            del lags[::2]


def _p99(values: list[float]) -> float | None:
    return quantile(sorted(values), 0.99).value if values else None


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
