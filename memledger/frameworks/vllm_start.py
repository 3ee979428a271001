"""One start of one vLLM server: running figures from its events, and the `Server` value they make."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from memledger.events import Event
from memledger.frameworks.exceptions import EXCEPTION_RULES, RootCause, ends_traceback, is_requests, is_wrapper
from memledger.frameworks.torch_oom import printed_time, seconds_between
from memledger.frameworks.vllm_config import ConfigFacts
from memledger.frameworks.vllm_failures import failure, merged, numbers, phase_of_frames, same_incident
from memledger.frameworks.vllm_ledger import Context, Ledger, RankFacts, build_ledger, pool_grant
from memledger.ledger import Capacity, Concurrency, Engine, Evidence, Failure, Gpu, Rank, Server, Span, State, Usage
from memledger.sanitize import clean
from memledger.units import Amount

RankKey = tuple[Any, ...]

RANK_RULES: Final = frozenset(
    {
        "weights",
        "drafter",
        "cpu_offload",
        "prefetch_offload",
        "weights_outside",
        "budget_consumed",
        "budget_split",
        "kv_bytes_given",
        "initial_free",
        "free_after_profiling",
        "init_snapshot",
        "requested_memory",
        "v0_budget",
        "v0_split",
        "v0_profile",
        "profile_debug",
        "graphs_in_budget",
        "kv_available",
        "multimodal_reserve",
        "graphs",
        "graph_estimate",
        "graph_parts",
        "graph_pool",
        "decode_workspace",
        "cpu_kv",
        "simple_offload",
        "engram",
        "startup_plan",
        "state_records",
        "world_rank",
        "rank_assignment",
        "sleep",
        "sleep_allocator",
    }
)
"""Rules whose lines are printed by a worker about its own device."""

ENGINE_RULES: Final = frozenset(
    {
        "kv_capacity",
        "concurrency",
        "blocks",
        "blocks_override",
        "cache_config_info",
        "group_sizes",
        "block_size",
        "graph_cap_blocks",
        "state_exact",
        "active_seqs",
        "hisparse_pool",
        "offload_region",
        "cp_multiplied",
        "state_padding",
        "padding_layers",
        "page_remarks",
    }
)
"""Rules whose lines say what one engine's pool holds."""

USAGE_RULES: Final = frozenset({"usage", "usage_sum", "usage_v0", "usage_early", "iteration", "preempted"})
POOL_RULES: Final = frozenset({"kv_available", "kv_capacity", "blocks", "kv_bytes_given", "v0_split", "v0_profile"})
MOST_FAILURES: Final = 50
MOST_RANKS: Final = 2048
MOST_START_LINES: Final = 300

LONGEST_WARM_UP_SECONDS: Final = 30
"""After capture vLLM runs the sampler once and is done (v1/worker/gpu_worker.py, `compile_or_warm_up_model`): what fails
later than this, with no line of the start between, fails while serving."""

SAMPLER_FRAMES: Final = frozenset({"_dummy_sampler_run", "sampling_metadata=dummy_metadata"})

_RULE_OF_TOKENS: Final = "how the token figure was computed"
_ROCM: Final = re.compile(r"rocm|aiter|hip", re.IGNORECASE)


class EngineFacts(msgspec.Struct):
    """What was printed about one data-parallel engine."""

    pid: int | None = None
    tokens: int | None = None
    tokens_pool: str | None = None
    length: int | None = None
    requests: float | None = None
    blocks: int | None = None
    blocks_exact: int | None = None
    fits: int | None = None
    cpu_blocks: int | None = None
    attention_block: int | None = None
    kernel_block: int | None = None
    group_blocks: tuple[int, ...] = ()
    active_seqs: int | None = None
    multiplied: int | None = None
    padding_percent: float | None = None
    padding_layers: int | None = None
    padding_layers_percent: float | None = None
    page_waste_percent: float | None = None
    usage: UsageFacts | None = None


class UsageFacts(msgspec.Struct):
    """Running peaks of one scheduler."""

    seen: bool = False
    ran: bool = False
    running: int | None = None
    queued: int | None = None
    kv: float | None = None
    preemptions: int | None = None
    lines: dict[str, Evidence] = {}

    def add(self, running: int | None, queued: int | None, kv: float | None, lines: dict[str, Evidence]) -> None:
        """One usage line, or the peaks of another scheduler; `lines` tells where each of the figures stands."""
        self.seen = True
        kv = round(kv, 6) if kv is not None else None
        for name, value in (("running", running), ("queued", queued), ("kv", kv)):
            known = getattr(self, name)
            if value is not None and (known is None or value > known):
                setattr(self, name, value)
                self.lines[name] = lines[name]

    def value(self, scope: Literal["engine", "sum_of_engines"] = "engine") -> Usage:
        """The peaks as a contract value."""
        return Usage(
            scope=scope,
            peak_running_requests=self.running,
            peak_queued_requests=self.queued,
            peak_kv_usage=self.kv,
            preemptions=self.preemptions,
            seen=self.seen,
            ran_between_samples=self.ran,
            evidence=tuple(dict.fromkeys(self.lines[k] for k in ("running", "queued", "kv") if k in self.lines)),
        )


class FailedAllocation(msgspec.Struct, frozen=True):
    """What torch's message says of the device, and which process printed it."""

    key: RankKey | None
    rank: int | None
    total: Amount
    gpu: int | None
    line: Evidence


class StartLine(msgspec.Struct, frozen=True):
    """What is kept of a line that starts something: enough to know it again (a restart loop has many)."""

    id: str
    digest: int
    time: str | None
    pid: int | None
    dp: int | None
    engine: str | None

    @staticmethod
    def of(event: Event) -> StartLine:
        """The line of an event."""
        prefix = event.prefix
        engine = event.word("engine")
        return StartLine(event.id, hash(event.message), prefix.time, prefix.pid, prefix.ranks.get("dp"), engine)


class Start:
    """One start. `take` is fed its events in order; `server` gives the value so far."""

    def __init__(self, source: str | None) -> None:
        self.source = source
        self.pids: set[tuple[str | None, int | None]] = set()
        self.config = ConfigFacts()
        self.engine_lines: list[StartLine] = []
        self.front_lines: list[StartLine] = []
        self.over = False
        self._version: str | None = None
        self._model: str | None = None
        self._span: dict[int, list[int]] = {}
        self._times: list[str] = []
        self._wrapper_time: str | None = None
        self._ranks: dict[RankKey, RankFacts] = {}
        self._rank_events: dict[RankKey, Event] = {}
        self._labels_seen: set[tuple[tuple[str, int], ...]] = set()
        self._engines: dict[int, EngineFacts] = {}
        self._sum: UsageFacts | None = None
        self._failures: list[Failure] = []
        self._failed_totals: list[FailedAllocation] = []
        self._start_line_time: str | None = None
        self._phase = "unknown"
        self._ready = self._stopped = self._died = self._pool_seen = self._engine_v0 = False
        self._device_words: set[str] = set()
        self._repeated: set[str] = set()
        self._device_name: str | None = None
        self._counted = 0
        self._frames: dict[int | None, set[str]] = {}
        self._at_crash: dict[str, Any] = {}
        self._cause = RootCause()
        self._death: tuple[Event, str] | None = None
        self._retry: Event | None = None
        self._failed_last = False
        self._has_front = self._quoted = False

    # -- routing: which lines this start waits for

    @property
    def waits_for_engine(self) -> bool:
        """Whether a front end has started (or at least said something of its configuration) and no engine yet."""
        heard = bool(self.front_lines) or self.config.any
        return heard and not self.engine_lines and not self.over and not self._serves

    @property
    def _serves(self) -> bool:
        # A front end prints a hybrid's block size and padding before there is an engine.
        pools = any(e.tokens is not None or e.blocks is not None or e.usage is not None for e in self._engines.values())
        return bool(self._ranks or pools or self._sum)

    def quotes_before(self, event: Event) -> bool:
        """Whether lines without a start, read so far, are later in time than this start line: an excerpt of the same log."""
        if self.engine_lines or self.front_lines or not self._times or event.prefix.time is None:
            return False
        first, now = self._times[0], event.prefix.time
        # Of the same day: a yearless stamp also falls at New Year.
        same_day = len(first) == len(now) and first.partition("T")[0] == now.partition("T")[0]
        self._quoted = self._quoted or (same_day and first > now)
        return self._quoted

    def same_moment(self, event: Event) -> bool:
        """Whether a front-end line of the same process and second was read: a quoted excerpt and then the whole log."""
        if event.prefix.time is None or not self.front_lines or event.id == self.front_lines[-1].id:
            return False
        return any(e.time == event.prefix.time and e.pid == event.prefix.pid for e in self.front_lines)

    def has_line(self, event: Event) -> bool:
        """Whether this very line was read before (an excerpt that quotes it twice)."""
        return StartLine.of(event) in (*self.engine_lines, *self.front_lines)

    def model_agrees(self, event: Event) -> bool:
        """Whether an engine line names the model that this start's front end named."""
        mine = self.config.model
        return mine is not None and f"model='{mine}'" in (event.word("config") or "")[:1000]

    def takes_engine(self, dp: int, pid: int | None) -> bool:
        """Whether engine `dp` of a data-parallel server may still start here."""
        if not self.engine_lines:
            return not self._engines or dp not in self._engines or self._engines[dp].pid in (None, pid)
        return all(e.dp is not None and (e.dp != dp or e.pid == pid) for e in self.engine_lines)

    def waits_for_front_line(self, event: Event) -> bool:
        """Whether a version or argument line belongs to this start's front end rather than to a new one."""
        if self.engine_lines or self.over or self._ranks or any(e.id == event.id for e in self.front_lines):
            return False
        pids = {e.pid for e in self.front_lines if e.pid is not None}
        return not pids or event.prefix.pid is None or event.prefix.pid in pids

    @property
    def waits_for_workers(self) -> bool:
        """Whether an engine has started and none of its workers yet."""
        return bool(self.engine_lines) and not self._ranks

    def label_is_free(self, label: tuple[tuple[str, int], ...]) -> bool:
        """Whether no other process of this start has these rank labels."""
        return label not in self._labels_seen

    @property
    def worth_telling(self) -> bool:
        """Whether anything was said that makes this a server."""
        return bool(
            self.engine_lines
            or self.front_lines
            or self._ranks
            or self._engines
            or self._failures
            or self._sum
            or self._counted
        )

    # -- taking events

    def begin(self, event: Event) -> None:
        """Count a line as this start's without reading it."""
        span = self._span.setdefault(event.input, [event.line, event.line])
        span[0], span[1] = min(span[0], event.line), max(span[1], event.line)

    def take(self, event: Event) -> None:
        """One event of this start."""
        self.begin(event)
        if event.id == "version" or re.match(r"(?:API|Api)Server", event.prefix.process or ""):
            self._has_front = True
        if event.prefix.time is not None:
            if not self._times:
                self._times.append(event.prefix.time)
            self._times[1:] = [event.prefix.time]
        self._wrapper_time = self._wrapper_time or event.prefix.wrapper_time
        if event.rule.kind == "failure":
            self._take_failure(event)
        elif event.rule.framework == "vllm":
            self._take_own(event)
        else:
            self._take_foreign(event)
        if event.prefix.repeated:
            self._repeated.add(event.id)

    def _take_own(self, event: Event) -> None:
        """A line of vLLM's that is no failure."""
        rule = event.id
        if rule != "engine_died" and ends_traceback(event):
            self._take_exception(event)
        elif rule != "engine_died" and not self._died:
            self._went_on(event)
            self._start_line_time = event.prefix.time or self._start_line_time
        if rule in USAGE_RULES:
            self._take_usage(event)
        elif rule in RANK_RULES:
            self._take_rank(event)
        elif rule in ENGINE_RULES:
            self._take_engine(event)
        else:
            self._take_rest(event)

    def _take_foreign(self, event: Event) -> None:
        """A line of torch, Python or the HTTP server that is no failure by itself."""
        rule = event.id
        if rule == "vllm_frame":
            word = event.word("function") or event.word("capture") or event.word("sampler") or ""
            self._frames.setdefault(event.prefix.pid, set()).add(word)
        elif rule in EXCEPTION_RULES:
            self._take_exception(event)
        elif rule == "exception_detail":
            self._cause.detail(event)
        elif rule == "alloc_retry":
            self._retry = event
        elif rule in {"ray_node_memory", "ray_process_memory"}:
            self._take_ray(event)
        elif rule == "http_started":
            self._ready, self._phase = True, "serving"
        elif rule == "http_stopped":
            self._stopped = self.over = True

    def _take_rest(self, event: Event) -> None:
        rule = event.id
        if rule in {"version", "banner_model", "engine_config", "crash_dump"}:
            version = event.word("version") or event.word("banner")
            if version is not None and (self._version is None or rule == "engine_config"):
                self._version = version
            if rule == "banner_model" or event.word("model"):
                self._model = self._model or event.word("model")
        if rule == "engine_config":
            _keep(self.engine_lines, event)
            self._engine_v0 = self._engine_v0 or event.word("engine") == "V0"
            self._phase = "start"
        elif rule in {"version", "non_default_args", "all_args"}:
            _keep(self.front_lines, event)
            self._phase = "start" if self._phase == "unknown" else self._phase
        elif rule == "worker_ready":
            self._see_rank(event)
            if event.word("model") is not None:
                self.config.lines.setdefault("model", event.word("model"))
                self._phase = "weights"
        elif rule in {"engine_ready", "server_ready"}:
            self._counted += rule == "engine_ready"
            # Behind an API server the engine's end of start-up is not yet the server's.
            self._ready = self._ready or rule == "server_ready" or not self._has_front
            self._phase = "serving"
        elif rule == "server_stopped":
            self._stopped = self.over = True
        elif rule == "asleep":
            self._phase = "sleep" if event.word("what") == "fall asleep" else "serving"
        elif rule == "crash_scheduler":
            if event.count("running") is not None:
                self._at_crash = {
                    "running_requests": event.count("running"),
                    "queued_requests": event.count("waiting"),
                    "kv_usage": event.share("kv"),
                }
        elif rule == "engine_died":
            self._take_death(event)
        elif rule == "device_name":
            self._device_name = self._device_name or event.word("name")
        self.config.take(event)

    # -- ranks

    def _rank_key(self, event: Event) -> RankKey | None:
        """The worker that printed a line; None where it is not a worker's."""
        prefix = event.prefix
        name = prefix.process or ""
        if re.match(r"(?:API|Api)Server|DPSupervisor", name):
            return None
        if prefix.pid is not None:
            return (prefix.host, prefix.pid)
        if prefix.ranks:
            return (prefix.host, *sorted(prefix.ranks.items()))
        return (prefix.host, name or None)

    def _see_rank(self, event: Event) -> RankFacts | None:
        key = self._rank_key(event)
        if key is None:
            return None
        name = event.prefix.process or ""
        if name.startswith(("EngineCore", "DPEngineCore", "DPMoE")) and event.id == "worker_ready":
            return self._ranks.get(key)
        key = self._cut_off(key, name)
        if key not in self._ranks and len(self._ranks) >= MOST_RANKS:
            return None
        facts = self._ranks.setdefault(key, RankFacts())
        if key not in self._rank_events or (event.prefix.ranks and not self._rank_events[key].prefix.ranks):
            self._rank_events[key] = event
            self._labels_seen.add(tuple(sorted(event.prefix.ranks.items())))
        return facts

    def _cut_off(self, key: RankKey, name: str) -> RankKey:
        """The rank of a line whose process was cut off in copying: the engine core's, where that is the only rank."""
        if key in self._ranks or len(self._ranks) != 1:
            return key
        (other,) = self._ranks
        bare, core = (key[0], None), self._rank_events[other].prefix.process or ""
        if key == bare and core.startswith("EngineCore"):
            return other
        if other == bare and name.startswith("EngineCore"):
            self._ranks[key] = self._ranks.pop(other)
            self._rank_events.pop(other)
        return key

    def _take_rank(self, event: Event) -> None:
        facts = self._see_rank(event)
        rule = event.id
        self.config.take(event)
        if facts is None:
            return
        if rule == "weights":
            if not any(_same_line(e, event) for e in facts.weights):
                facts.weights.append(event)
                del facts.weights[8:]
            self._phase = "profiling"
        elif rule == "graphs":
            if event.word("encoder") == "Encoder g" and facts.graphs is not None:
                return
            facts.graphs = event
            facts.graphs_before_pool = bool(self.engine_lines) and not self._pool_seen
            if self._phase == "graph_capture":
                self._phase = "warmup"
        else:
            facts.latest[rule] = event
            if rule == "graph_pool" and self._phase == "graph_capture":
                self._phase = "warmup"
        if rule == "kv_available":
            self._phase = "kv_pool"
        if rule in POOL_RULES:
            self._pool_seen = True
        if rule in {"world_rank", "rank_assignment"} and event.count("world") == 1:
            self.config.lines["tensor_parallel_size"] = self.config.lines["pipeline_parallel_size"] = 1
            if event.prefix.process == "EngineCore":
                # A data-parallel engine carries its number in its name.
                self.config.lines["data_parallel_size"] = 1
        if rule == "cpu_kv":
            self._device_words.add("cpu")
        if rule == "sleep":
            self._phase = "sleep"

    # -- engines

    def _engine_of(self, event: Event) -> EngineFacts:
        index = event.count("engine")
        if index is None:
            index = event.prefix.ranks.get("dp", 0)
        facts = self._engines.setdefault(index, EngineFacts())
        if (event.prefix.process or "").startswith("EngineCore"):
            facts.pid = event.prefix.pid
        return facts

    def _take_engine(self, event: Event) -> None:
        rule = event.id
        if rule == "block_size" and not self.engine_lines and not self._engines:
            # Printed by the front end before any engine exists (up to 0.19.1): true of all engines.
            self.config.lines["block_size"] = event.count("attention") or event.count("kernel")
            if event.count("attention") is not None:
                self.config.lines["attention_block"] = event.count("attention")
            return
        if rule in {"offload_region", "hisparse_pool"}:
            self._take_engine_host(event)
            return
        engine = self._engine_of(event)
        if rule in {"kv_capacity", "concurrency"}:
            self._take_capacity(engine, event)
        elif rule == "blocks":
            engine.blocks = _smallest(engine.blocks, event.count("blocks"))
            engine.cpu_blocks = _smallest(engine.cpu_blocks, event.count("cpu"))
            self._device_words.add((event.word("device") or "").lower())
            self._enter_pool()
        elif rule == "blocks_override":
            # num_gpu_blocks=0: the graph-profiling pass sizes a throw-away pool.
            if (fits := event.count("fits")) and (used := event.count("used")) is not None:
                engine.fits, engine.blocks = fits, used
        elif rule == "cache_config_info":
            if (event.count("engines") or 1) == 1:
                engine.blocks_exact = event.count("blocks")
        elif rule == "group_sizes":
            first = event.count("first")
            others = event.fields.get("others")
            if first is not None:
                more = tuple(n for n in others if isinstance(n, int)) if isinstance(others, tuple) else ()
                engine.group_blocks = (first, *more)
        elif rule == "block_size":
            if (attention := event.count("attention")) is not None:
                engine.attention_block = attention
            else:
                engine.kernel_block = event.count("kernel")
                self.config.take(event)
        elif rule in {"graph_cap_blocks", "state_exact"}:
            engine.blocks_exact = event.count("blocks") or event.count("none")
        elif rule == "active_seqs":
            engine.active_seqs = event.count("after")
        elif rule == "cp_multiplied":
            engine.multiplied = event.count("factor")
        elif rule == "state_padding":
            engine.padding_percent = event.number("percent")
        elif rule == "padding_layers":
            engine.padding_layers = event.count("layers")
            engine.padding_layers_percent = event.number("percent")
        elif rule == "page_remarks" and (percent := event.number("percent")) is not None:
            engine.page_waste_percent = max(percent, engine.page_waste_percent or 0.0)

    def _take_capacity(self, engine: EngineFacts, event: Event) -> None:
        """Tokens and concurrency; printed once per worker up to 0.11.0, and the smallest is real."""
        self._enter_pool()
        if (tokens := event.count("tokens")) is not None and tokens >= 0:
            engine.tokens = _smallest(engine.tokens, tokens)
            engine.tokens_pool = event.word("pool")
            if engine.tokens_pool is not None:
                self._device_words.add(engine.tokens_pool.split()[0].lower())
        length, requests = event.count("length"), event.number("requests")
        if length is not None and requests is not None:
            if engine.length == length and engine.requests is not None:
                engine.requests = min(engine.requests, requests)
            else:
                engine.length, engine.requests = length, requests

    def _take_engine_host(self, event: Event) -> None:
        """Host memory that an engine reports: kept with the first rank (it belongs to all of them)."""
        facts = next(iter(self._ranks.values()), None) or self._see_rank(event)
        if facts is not None:
            facts.latest[event.id] = event

    def _enter_pool(self) -> None:
        self._pool_seen = True
        self._phase = "graph_capture"

    # -- usage

    def _take_usage(self, event: Event) -> None:
        if not self._died:
            self._ready = True
            self._phase = "serving" if self._phase != "sleep" else self._phase
        if event.id == "usage_sum" and (event.count("engines") or 1) > 1:
            self._sum = self._sum or UsageFacts()
            facts = self._sum
        else:
            engine = self._engine_of(event)
            engine.usage = facts = engine.usage or UsageFacts()
        if event.id == "preempted":
            # Cumulative, printed every 50th time.
            facts.preemptions = _largest(facts.preemptions, event.count("total"))
            return
        facts.ran = facts.ran or any((event.number(n) or 0) > 0 for n in ("prompted", "generated"))
        running = event.count("running")
        self._failed_last = self._failed_last and not running
        if event.id == "iteration":
            running = (event.count("context_requests") or 0) + (event.count("generation_requests") or 0)
        line = event.evidence
        facts.add(running, event.count("waiting"), event.share("kv"), dict.fromkeys(("running", "queued", "kv"), line))
        if (again := event.count("preemptions")) is not None:
            facts.preemptions = (facts.preemptions or 0) + again

    # -- failures

    def _in_phase(self, event: Event) -> Failure:
        """The failure of a line, in the phase that its traceback, or else the lines before it, tell."""
        frames = self._frames.pop(event.prefix.pid, set())
        if (phase := phase_of_frames(frames)) is not None:
            return failure(event, phase)
        if self._phase == "unknown" and frames & SAMPLER_FRAMES and event.amount("private") is not None:
            # The profiling run tries the sampler, too, but before any graph has a pool.
            return failure(event, "warmup")
        found = failure(event, self._phase)
        if found.phase != "warmup":
            return found
        passed = seconds_between(self._start_line_time, printed_time(event))
        if passed is None or passed <= LONGEST_WARM_UP_SECONDS:
            return found
        return msgspec.structs.replace(
            found, phase="serving", numbers={**found.numbers, "seconds_after_capture": round(passed)}
        )

    def _take_failure(self, event: Event) -> None:
        found = self._in_phase(event)
        key = self._rank_key(event)
        if re.match(r"Worker|VllmWorker|Ray", event.prefix.process or ""):
            self._see_rank(event)
        if event.id == "free_memory_too_small" and key is not None and event.amount("total") is not None:
            facts = self._see_rank(event)
            if facts is not None:
                facts.latest[event.id] = event
        elif event.id in {"oom", "load_oom"} and (size := event.amount("total")) is not None:
            number, gpu = event.prefix.ranks.get("rank"), event.count("gpu")
            self._failed_totals.append(FailedAllocation(key, number, size, gpu, event.evidence))
            del self._failed_totals[MOST_FAILURES:]
            if event.word("device") == "HIP":
                self._device_words.add("rocm")
        if event.id == "state_blocks_too_few":
            self._engine_of(event).blocks_exact = event.count("blocks")
        for index, earlier in enumerate(self._failures):
            if same_incident(earlier, found):
                self._failures[index] = merged(earlier, found)
                return
        if len(self._failures) < MOST_FAILURES:
            self._failures.append(found)
        # The front end's own allocations fail for one request; an engine's are its end, unless it is seen to go on.
        front = re.match(r"(?:API|Api)Server", event.prefix.process or "") is not None
        self._failed_last = self._failed_last or (found.kind == "cuda_oom" and self._ready and not front)
        if not self._ready and self._phase != "serving" and found.kind != "other_process_killed":
            self._died = True

    def _take_exception(self, event: Event) -> None:
        """The end of a traceback, which no rule about memory takes: the cause, should the process die of it."""
        process = event.prefix.process or ""
        front = re.match(r"(?:API|Api)Server|DPSupervisor|MainProcess", process) is not None
        if is_wrapper(event) or ((front or not process) and self._ready and is_requests(event)):
            return
        level = 3 if front else 0 if re.match(r"Worker|VllmWorker|Ray", process) else 1 if process else 2
        if front and self._ready:
            # What a request raised is the request's; the engine says itself what it dies of.
            return
        phase = phase_of_frames(self._frames.pop(event.prefix.pid, set())) or self._phase
        if front and phase == "serving":
            phase = "start"
        early = front and not self.engine_lines and not self._ranks
        self._cause.take(event, event.prefix.pid or process, level, phase, before_engine=early)

    def _take_ray(self, event: Event) -> None:
        """What Ray's memory monitor says after it killed a worker: of the node, and of its largest process."""
        found = [i for i, f in enumerate(self._failures) if f.kind == "host_memory"]
        if not found:
            return
        failure_ = self._failures[found[-1]]
        figures = {name: value for name in ("used", "limit", "task") if (value := event.number(name)) is not None}
        if event.id == "ray_process_memory":
            # The table is sorted: its first line is the largest.
            new = {"largest_process_gb": figures.get("used"), "largest_process_pid": event.count("pid")}
        else:
            names = {"used": "node_used_gb", "limit": "node_limit_gb", "task": "killed_process_gb"}
            new = {names[name]: value for name, value in figures.items()}
        numbers_ = {**new, **failure_.numbers}
        evidence = failure_.evidence if numbers_ == failure_.numbers else (*failure_.evidence, event.evidence)[:4]
        self._failures[found[-1]] = msgspec.structs.replace(failure_, numbers=numbers_, evidence=evidence)

    def _went_on(self, event: Event) -> None:
        """A process that prints on has not died of what it printed before."""
        self._retry = None
        if event.id in USAGE_RULES:
            self._cause.forget()
        else:
            self._cause.forget(event.prefix.pid or event.prefix.process or "")

    def _take_death(self, event: Event) -> None:
        if self._stopped:
            return
        self._died = True
        self._death = self._death or (event, phase_of_frames(self._frames.get(event.prefix.pid, set())) or self._phase)
        codes = [event.count(n) for n in ("code", "process_code", "worker_code")]
        killed = -9 in codes or ": -9" in (event.word("codes") or "")
        if killed:
            found = Failure("killed", self._phase, {"exit_code": -9}, (event.evidence,))
            for index, earlier in enumerate(self._failures):
                if earlier.kind == "killed":
                    self._failures[index] = merged(earlier, found)
                    return
            self._failures.append(found)
        if any(event.word(n) for n in ("start", "init", "process")):
            self.over = True

    # -- the value

    def server(self) -> Server:
        """The server as far as it was read."""
        fraction = self._printed_fraction()
        config = self.config.names(fraction)
        config["engine"] = "V0" if self._is_v0() else "V1" if self._is_v1() else None
        notes: list[str] = []
        engines = self._engine_values(config)
        ranks = self._rank_values(config, engines, notes)
        model = self.config.model or self._model
        return Server(
            framework="vllm",
            framework_version=self._version,
            model=clean(model) if model is not None else None,
            label=self.source,
            span=tuple(Span(i, a, b) for i, (a, b) in sorted(self._span.items())),
            started_at=self._started_at(),
            ended_at=self._date(self._times[-1]) if self._times else None,
            state=self._state(),
            config={k: clean(v) if isinstance(v, str) else v for k, v in config.items()},
            ranks=ranks,
            engines=engines,
            usage=self._usage(),
            failures=tuple(self._failure_values()),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _failure_values(self) -> list[Failure]:
        """The failures; those while serving with what the scheduler held when it crashed."""
        return [
            msgspec.structs.replace(f, numbers={**self._at_crash, **f.numbers}) if f.phase == "serving" else f
            for f in [*self._causes(), *self._failures]
        ]

    def _causes(self) -> list[Failure]:
        """Why the server failed, where no line about memory says it: the exception that its process died of."""
        if self._state() != "failed" or any(f.kind != "killed" for f in self._failures):
            return []
        if self._retry is not None:
            # Printed for tries that succeed, too: it counts because the process died without another word on memory.
            return [Failure("cuda_oom", self._phase_of_death(), numbers(self._retry), (self._retry.evidence,))]
        if (found := self._cause.failure()) is not None:
            return [found]
        if self._failures or self._death is None:
            return []
        event, _ = self._death
        return [Failure("process_died", self._phase_of_death(), {}, (event.evidence,))]

    def _phase_of_death(self) -> str:
        if self._death is None:
            return self._phase
        event, phase = self._death
        return phase_of_frames(self._frames.get(event.prefix.pid, set())) or phase

    def _started_at(self) -> str | None:
        """The first line's time, or (where an excerpt stands before the whole log) the first start line's."""
        lines = [e.time for e in (*self.front_lines, *self.engine_lines) if e.time is not None]
        if self._quoted and lines:
            return self._date(lines[0])
        return self._date(self._times[0]) if self._times else None

    def _date(self, time: str) -> str:
        """A yearless stamp takes the year that a container's or journal's stamp prints."""
        year = re.match(r"(\d{4})-", self._wrapper_time or "")
        return year.group(1) + time[1:] if time.startswith("--") and year else time

    def _state(self) -> State:
        if self._died or self._failed_last:
            return "failed"
        if self._stopped:
            return "stopped"
        if self._ready:
            return "serving"
        if self._cause and (self.engine_lines or self.front_lines or self._ranks):
            # A traceback before the server was up, and no word of its process after it.
            return "failed"
        return "starting" if self.engine_lines or self.front_lines or self._ranks else "unknown"

    def _is_v0(self) -> bool:
        names = {e.prefix.process for e in self._rank_events.values()}
        return self._engine_v0 or "VllmWorkerProcess" in names or self._has("v0_split") or self._has("v0_profile")

    def _is_v1(self) -> bool:
        return any(e.engine == "V1" for e in self.engine_lines)

    def _has(self, rule: str) -> bool:
        return any(rule in f.latest for f in self._ranks.values())

    def _printed_fraction(self) -> float | None:
        for rule in ("budget_consumed", "budget_split", "v0_profile", "v0_budget", "initial_free"):
            for facts in self._ranks.values():
                if (event := facts.event(rule)) is not None and (value := event.number("utilization")) is not None:
                    return value
        for found in self._failures:
            if isinstance(value := found.numbers.get("memory_fraction"), float):
                return value
        return None

    # -- engines as values

    def _block_tokens(self, engine: EngineFacts, config: dict[str, Any]) -> int | None:
        """Tokens per block of the attention groups: the hybrid's aligned size, a backend's, the groups', the flag."""
        if engine.attention_block is not None:
            return engine.attention_block
        if (found := self.config.lines.get("attention_block")) is not None:
            return int(found)
        if engine.kernel_block is not None:
            return engine.kernel_block
        if (found := self.config.lines.get("block_size")) is not None:
            return int(found)
        # A state group without prefix caching has the longest request as its block.
        if (found := self.config.lines.get("block_checked")) is not None:
            return int(found)
        groups = {b for b in engine.group_blocks if b != config.get("context_length")}
        if len(groups) == 1:
            return groups.pop()
        size = config.get("page_size")
        return size if isinstance(size, int) else None

    def _shared_blocks(self) -> EngineFacts:
        """Block sizes are printed by workers too, under their own labels: one size holds for all engines."""
        return next(
            (e for e in self._engines.values() if e.attention_block is not None or e.kernel_block is not None),
            EngineFacts(),
        )

    def _capacity(self, engine: EngineFacts, config: dict[str, Any]) -> Capacity:
        shared = self._shared_blocks()
        if engine.attention_block is None:
            engine.attention_block = shared.attention_block
        if engine.kernel_block is None:
            engine.kernel_block = shared.kernel_block
        block = self._block_tokens(engine, config)
        blocks = engine.blocks_exact if engine.blocks_exact is not None else engine.blocks
        tokens = engine.tokens
        if self._contradicts(engine, blocks, block):
            block = None
        if tokens is None and engine.blocks is not None and block is not None and self._engine_block_rule(engine):
            tokens = engine.blocks * block
        seqs = engine.active_seqs or config.get("max_running_requests") or self.config.lines.get("seqs_default")
        return Capacity(
            kv_tokens=tokens,
            kv_blocks=blocks,
            kv_block_tokens=block,
            max_running_requests=seqs,
            concurrency=Concurrency(engine.length, engine.requests),
        )

    def _contradicts(self, engine: EngineFacts, blocks: int | None, block: int | None) -> bool:
        """Whether the printed tokens cannot be in so many blocks of that size, however they were counted.

        A backend with blocks of its own (Neuron: one block per sequence) passes over the flag. Window and state groups
        need less than their length, and context parallelism multiplies a block: these say nothing against the size.
        """
        if engine.tokens is None or blocks is None or block is None or engine.multiplied is not None:
            return False
        if engine.attention_block is not None or len(engine.group_blocks) > 1 or engine.padding_percent is not None:
            return False
        return engine.tokens > 2 * blocks * block

    def _engine_block_rule(self, engine: EngineFacts) -> bool:
        """Whether tokens are blocks times block size: only where blocks alone were printed (V0, early V1)."""
        return engine.tokens is None and engine.multiplied is None

    def _engine_values(self, config: dict[str, Any]) -> tuple[Engine, ...]:
        return tuple(
            Engine(dp, facts.pid, self._capacity(facts, config), facts.usage.value() if facts.usage else Usage())
            for dp, facts in sorted(self._engines.items())
            if self._tells(facts)
        )

    def _tells(self, facts: EngineFacts) -> bool:
        if facts is self._engines.get(0):
            return True
        return any(v is not None for v in (facts.tokens, facts.blocks, facts.blocks_exact, facts.usage, facts.requests))

    def _usage(self) -> Usage:
        """The peaks of one scheduler, the largest; the sum of all only where nothing else was printed."""
        found = [e.usage for e in self._engines.values() if e.usage is not None]
        if not found:
            return self._sum.value("sum_of_engines") if self._sum is not None else Usage()
        best = UsageFacts()
        for one in found:
            best.add(one.running, one.queued, one.kv, one.lines)
            best.preemptions = _largest(best.preemptions, one.preemptions)
            best.ran = best.ran or one.ran
        return best.value()

    # -- ranks as values

    def _rank_values(self, config: dict[str, Any], engines: tuple[Engine, ...], notes: list[str]) -> tuple[Rank, ...]:
        keys = self._worker_keys()
        labels = self._labels(keys, config)
        grants = self._smallest_grants(keys, labels, config)
        ranks = []
        every: list[RankKey | None] = [*keys] or [None]
        for key in every:
            facts = self._ranks.get(key, RankFacts()) if key is not None else RankFacts()
            label: dict[str, int | None] = labels[key] if key is not None else {"tp": 0}
            capacity = _capacity_for(label.get("dp"), engines)
            failed = self._failed_total(key, label, config)
            context = self._context(config, label, facts, grants, capacity, failed)
            ledger = build_ledger(facts, context)
            ranks.append(self._rank(key, label, facts, ledger, capacity, failed))
            notes += [f"{ranks[-1].label}: {n}" if len(keys) > 1 else n for n in ledger.notes]
        ranks.sort(key=_rank_order)
        self._note_suppressed(ranks, notes)
        if self.config.lines.get("warmup_failed"):
            notes.append("a state kernel's warm-up failed: the first request may run out of memory in the autotuner")
        self._note_silent(len(keys), config, notes)
        return tuple(ranks)

    def _worker_keys(self) -> list[RankKey]:
        """Ranks in order of first line: engine cores and unprefixed lines count only where no worker stands for them."""
        kinds = {k: (e.prefix.process or "") for k, e in self._rank_events.items()}
        workers = [k for k, name in kinds.items() if re.match(r"Worker|VllmWorker|Ray|Gpu|Cpu|Xpu", name)]
        if not workers:
            return list(kinds)
        if all(kinds[k].startswith(("VllmWorkerProcess", "RayWorkerWrapper")) for k in workers):
            # V0: rank 0 is the driver, which prints without a prefix.
            return [k for k in kinds if k in workers or (not kinds[k] and self._substance(k))]
        return workers

    def _substance(self, key: RankKey) -> bool:
        facts = self._ranks[key]
        return bool(facts.weights or facts.graphs or facts.latest)

    def _labels(self, keys: list[RankKey], config: dict[str, Any]) -> dict[RankKey, dict[str, int | None]]:
        tp, pp = config.get("tp_size"), config.get("pp_size")
        labels: dict[RankKey, dict[str, int | None]] = {}
        for key in keys:
            event, facts = self._rank_events[key], self._ranks[key]
            printed = event.prefix.ranks
            label: dict[str, int | None] = {n: printed.get(n) for n in ("dp", "pp", "tp", "ep")}
            if (event.prefix.process or "").startswith("EngineCore") and not self._several_engines(config):
                label["dp"] = None
            assigned, world = facts.event("rank_assignment"), facts.event("world_rank")
            if assigned is not None:
                # Like the process names: a part is told only where that size is more than one.
                parts = ["tp", *(["pp"] if (pp or 1) > 1 else []), *(["ep"] if config.get("ep_size") else [])]
                for name in parts:
                    label[name] = label[name] if label[name] is not None else assigned.count(name)
            number = printed.get("rank")
            if number is None and world is not None and (world.count("world") or 0) <= (tp or 1) * (pp or 1):
                number = world.count("rank")
            if number is not None and label["tp"] is None and isinstance(tp, int):
                label["tp"], label["pp"] = number % tp, number // tp if (pp or 1) > 1 else None
            elif number is not None and label["tp"] is None and (pp or 1) == 1:
                label["tp"] = number
            labels[key] = label
        self._default_labels(keys, labels, config)
        return labels

    def _default_labels(
        self, keys: list[RankKey], labels: dict[RankKey, dict[str, int | None]], config: dict[str, Any]
    ) -> None:
        alone = config.get("tp_size") == 1 and config.get("pp_size") in (None, 1)
        for key in keys:
            label, prefix = labels[key], self._rank_events[key].prefix
            driver = prefix.process is None and prefix.pid is None
            # Such a worker is one of several: alone in an excerpt, it may be any of them.
            only = len(keys) == 1 and not re.match(r"VllmWorkerProcess|RayWorkerWrapper", prefix.process or "")
            if label["tp"] is None and label["pp"] is None and (only or alone or driver):
                label["tp"] = 0

    def _several_engines(self, config: dict[str, Any]) -> bool:
        return len(self._engines) > 1 or (config.get("dp_size") or 1) > 1

    def _smallest_grants(
        self, keys: list[RankKey], labels: dict[RankKey, dict[str, int | None]], config: dict[str, Any]
    ) -> dict[tuple[int | None, int | None], Amount]:
        """Per engine and pipeline stage: the smallest grant, where every rank of the engine printed its own.

        All ranks get the same number of blocks; blocks are equally large only within one pipeline stage.
        """
        found: dict[tuple[int | None, int | None], list[Amount]] = {}
        for key in keys:
            grant = pool_grant(self._ranks[key], config.get("kv_cache_memory_bytes"))
            if grant is not None:
                found.setdefault((labels[key]["dp"], labels[key]["pp"]), []).append(grant.amount)
        tp = config.get("tp_size") or 1
        if (config.get("pp_size") or 1) > 1 or tp < 2:
            return {}
        return {
            group: min(grants, key=lambda a: a.bytes)
            for group, grants in found.items()
            if len(grants) == tp and min(g.bytes for g in grants) > 0
        }

    def _context(
        self,
        config: dict[str, Any],
        label: dict[str, int | None],
        facts: RankFacts,
        grants: dict[tuple[int | None, int | None], Amount],
        capacity: Capacity,
        failed: FailedAllocation | None,
    ) -> Context:
        engine = self._engines.get(label.get("dp") or 0)
        if engine is None:
            engine = next(iter(self._engines.values())) if len(self._engines) == 1 else EngineFacts()
        fraction = self._printed_fraction()
        if fraction is None and isinstance(config.get("memory_fraction"), float):
            fraction = config["memory_fraction"]
        v0 = self._is_v0()
        return Context(
            fraction=fraction,
            kv_bytes=config.get("kv_cache_memory_bytes"),
            graphs_off=self.config.graphs_off,
            draft_apart=v0 and bool(self.config.speculative),
            version=_release(self._version),
            smallest_grant=grants.get((label.get("dp"), label.get("pp"))),
            blocks_fit=engine.fits if engine.fits is not None else engine.blocks,
            blocks_used=engine.blocks,
            pool_detail=self._pool_detail(config, capacity, engine),
            cpu_blocks=engine.cpu_blocks if v0 or not self._is_v1() else None,
            swap_gib=config.get("swap_space_gib"),
            pool_failed=any(f.phase == "kv_pool" for f in self._failures),
            failed_total=failed.total if failed is not None else None,
            failed_total_lines=(failed.line,) if failed is not None else (),
        )

    def _pool_detail(self, config: dict[str, Any], capacity: Capacity, engine: EngineFacts) -> dict[str, Any]:
        detail: dict[str, Any] = {
            "tokens": capacity.kv_tokens,
            "blocks": capacity.kv_blocks,
            "block_tokens": capacity.kv_block_tokens,
            "dtype": config.get("kv_cache_dtype"),
            "tokens_rule": token_rule(capacity) if engine.tokens is not None else None,
            "state_padding_percent": engine.padding_percent,
            "padding_layers": engine.padding_layers,
            "padding_layers_percent": engine.padding_layers_percent,
            "page_waste_percent": engine.page_waste_percent,
            "groups": len(engine.group_blocks) if len(engine.group_blocks) > 1 else None,
            "window_as_full": True if self.config.lines.get("window_as_full") else None,
            "includes_recurrent_state": True if engine.attention_block is not None else None,
        }
        return {k: v for k, v in detail.items() if v is not None}

    def _failed_total(
        self, key: RankKey | None, label: dict[str, int | None], config: dict[str, Any]
    ) -> FailedAllocation | None:
        """The allocation that failed on this rank: its own process printed it, or a server of one GPU did."""
        own = [f for f in self._failed_totals if f.key == key]
        number = label.get("tp") if label.get("pp") is None and label.get("dp") is None else None
        own += [f for f in self._failed_totals if f.rank is not None and f.rank == number]
        if own:
            return own[0]
        alone = all(config.get(n) in (None, 1) for n in ("tp_size", "pp_size", "dp_size"))
        named = key is not None and re.match(r"Worker_|VllmWorker|Ray", self._rank_events[key].prefix.process or "")
        if not alone or named or len(self._ranks) > 1 or any(label.get(n) for n in ("tp", "pp", "dp", "ep")):
            return None
        found = {(f.total, f.gpu) for f in self._failed_totals}
        return self._failed_totals[0] if len(found) == 1 else None

    def _rank(
        self,
        key: RankKey | None,
        label: dict[str, int | None],
        facts: RankFacts,
        ledger: Ledger,
        capacity: Capacity,
        failed: FailedAllocation | None,
    ) -> Rank:
        prefix = self._rank_events[key].prefix if key is not None else None
        world = facts.event("world_rank")
        index = failed.gpu if failed is not None else None
        if index is None and world is not None and (local := world.count("local_rank")) is not None and local >= 0:
            index = local
        kind = self._gpu_kind()
        name = self._device_name.replace("_", " ") if self._device_name is not None else None
        return Rank(
            dp=label.get("dp"),
            pp=label.get("pp"),
            tp=label.get("tp"),
            ep=label.get("ep"),
            pid=prefix.pid if prefix is not None else None,
            host=prefix.host if prefix is not None else None,
            gpu=Gpu(
                kind=kind,
                index=index if kind != "cpu" else None,
                name=name,
                total_bytes=ledger.total.bytes if ledger.total is not None else None,
                unified_memory=True if name is not None and re.search(r"\b(?:GB10|Thor|Orin)\b", name) else None,
            ),
            budget=ledger.budget,
            entries=ledger.entries,
            stages=ledger.stages,
            residual=ledger.residual,
            capacity=capacity,
        )

    def _gpu_kind(self) -> Literal["cuda", "rocm", "npu", "xpu", "musa", "cpu"] | None:
        words = self._device_words
        device = self.config.engine.get("device_config")
        text = device if isinstance(device, str) else ""
        backends = " ".join(self.config.backends.values())
        if "cpu" in words or (text == "cpu" and "gpu" not in words):
            return "cpu"
        if "rocm" in words or "+rocm" in (self._version or "") or _ROCM.search(backends):
            return "rocm"
        if "xpu" in words or text == "xpu":
            return "xpu"
        if text == "npu":
            return "npu"
        return "cuda" if text == "cuda" else None

    def _note_silent(self, ranks: int, config: dict[str, Any], notes: list[str]) -> None:
        sizes = [config.get(n) for n in ("tp_size", "pp_size", "dp_size")]
        if all(s is None for s in sizes):
            return
        expected = 1
        for size in sizes:
            expected *= size if isinstance(size, int) and size > 0 else 1
        if 0 < ranks < expected:
            notes.append(
                f"{expected - ranks} of {expected} ranks printed no line of their own: what they hold is not in the log"
            )

    def _note_suppressed(self, ranks: list[Rank], notes: list[str]) -> None:
        silences: dict[tuple[str, bool], list[str]] = {}
        for account, what in (("weights", "weights"), ("kv_cache", "KV pool"), ("cuda_graphs", "CUDA graphs")):
            silent = [r for r in ranks if not any(e.account.startswith(account) for e in r.entries)]
            if account == "weights":
                silent = [r for r in silent if not any(e.account == "weights_and_non_torch" for e in r.entries)]
            if silent and len(silent) < len(ranks):
                names = ", ".join(r.label for r in silent[:8]) + (" ..." if len(silent) > 8 else "")
                first_only = all(not r.tp for r in ranks if r not in silent)
                silences.setdefault((names, first_only), []).append(what)
        for (names, first_only), kinds in silences.items():
            version = _release(self._version)
            # info_once with a rank filter: vLLM 0.11.1 (logger.py); before that every worker printed its own line.
            filtered = first_only and (version is None or version >= (0, 11))
            why = ": vLLM prints these for local rank 0 only" if filtered else " in the log"
            notes.append(f"no {_and(kinds)} line of {names}{why}; no figure is copied from another rank")
        if self._repeated:
            notes.append(
                "Ray folded equal lines of several workers into one; which workers they were is not in the log"
            )


def token_rule(capacity: Capacity) -> str:
    """How the printed token figure was computed, by testing it.

    Up to 0.20.0 it is blocks (over groups) times block size, so a multiple of the block size; later it is
    `int(concurrency x longest request)` (v1/core/kv_cache_utils.py). Both or neither: not determined.
    """
    tokens, block = capacity.kv_tokens, capacity.kv_block_tokens
    length, requests = capacity.concurrency.tokens_per_request, capacity.concurrency.requests
    if tokens is None or length is None or requests is None:
        return "not determined"
    effective = abs(tokens - requests * length) <= 0.005 * length + 1
    physical = block is not None and block > 1 and tokens % block == 0
    if physical and not effective:
        return "blocks x block size"
    if effective and not physical and block is not None:
        return "concurrency x longest request"
    return "not determined"


def _and(words: list[str]) -> str:
    """`weights, KV pool and CUDA graphs`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _capacity_for(dp: int | None, engines: tuple[Engine, ...]) -> Capacity:
    """The capacity of a rank's engine, or what all engines agree on."""
    for engine in engines:
        if dp is not None and engine.dp == dp:
            return engine.capacity
    if engines and all(e.capacity == engines[0].capacity for e in engines):
        return engines[0].capacity
    return Capacity()


def _rank_order(rank: Rank) -> tuple[int, int, int, int, int]:
    return (
        rank.dp if rank.dp is not None else -1,
        rank.pp if rank.pp is not None else -1,
        rank.tp if rank.tp is not None else 1 << 30,
        rank.ep if rank.ep is not None else -1,
        rank.pid if rank.pid is not None else -1,
    )


def _release(version: str | None) -> tuple[int, int] | None:
    """Major and minor of a release; None for builds whose version says nothing (0.1.dev1, 0.0.0+fork)."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or (found.group(1) == "0" and int(found.group(2)) < 4):
        return None
    return int(found.group(1)), int(found.group(2))


def _keep(lines: list[StartLine], event: Event) -> None:
    line = StartLine.of(event)
    if line not in lines and len(lines) < MOST_START_LINES:
        lines.append(line)


def _same_line(a: Event, b: Event) -> bool:
    return a.message == b.message and a.prefix.time == b.prefix.time and a.prefix.pid == b.prefix.pid


def _largest(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _smallest(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


__all__ = ["Start", "token_rule"]
