"""One start of one SGLang server in the making: ranks, configuration, capacity, usage, failures.

Facts about wordings and their order come from SGLang's own releases 0.2.5 to 0.5.23 (see `parsers/sglang.toml`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from memledger.cards import unified_total
from memledger.events import Event
from memledger.frameworks.arguments import as_int
from memledger.frameworks.exceptions import EXCEPTION_RULES, RootCause, is_requests, is_wrapper
from memledger.frameworks.sglang_config import BEFORE_THE_DUMP, ConfigBuilder
from memledger.frameworks.sglang_derived import derive
from memledger.frameworks.sglang_failures import CONSEQUENCES, MOST_FAILURES, FailureLog, allocation_failure
from memledger.frameworks.sglang_rank import DRAFT_TYPE, RankBuilder, RankFacts, tokens_of
from memledger.frameworks.sglang_usage import UsageBuilder, largest
from memledger.frameworks.sglang_versions import VersionRange
from memledger.ledger import Capacity, Engine, Evidence, Failure, Gpu, Server, Span, State
from memledger.units import MIB, Amount

_RANK_EVENTS: Final[dict[str, Callable[[RankBuilder, Event], None]]] = {
    "load_weight_begin": RankBuilder.load_begin,
    "load_weight_end": RankBuilder.load_end,
    "kv_pool": RankBuilder.kv_pool,
    "kv_pool_virtual": RankBuilder.virtual_pool,
    "swa_sum": RankBuilder.swa_sum,
    "swa_tokens": RankBuilder.swa_tokens,
    "swa_tokens_all": RankBuilder.swa_tokens,
    "swa_ring": RankBuilder.swa_tokens,
    "state_pool": RankBuilder.state_pool,
    "unified_pool": RankBuilder.unified_pool,
    "unified_slots": RankBuilder.unified_slots,
    "checkpoint_pool": RankBuilder.checkpoint_pool,
    "pool_end": RankBuilder.pool_end,
    "post_capture_kv": RankBuilder.post_capture,
    "graph_begin": RankBuilder.graph_begin,
    "graph_begin_old": RankBuilder.graph_begin,
    "graph_adaptive": RankBuilder.adaptive_graphs,
    "lora": RankBuilder.lora,
}
"""Lines that every rank prints for itself."""

_DEVICE_EVENTS: Final[dict[str, tuple[str, str, str]]] = {
    "p2p_warmup": ("communication", "size", "peer-to-peer transports"),
    "prefill_workspace": ("workspace", "size", "workspace of full prefill graphs"),
    "indexer_workspace": ("workspace", "size", "indexer workspace"),
    "megakernel": ("workspace", "size", "fused kernel"),
    "symmetric_pool": ("communication", "size", "symmetric memory pool"),
    "k3_buffer": ("communication", "size", "symmetric buffer"),
    "vocab_gather": ("communication", "size", "vocabulary gather buffer"),
    "deepep_buffer": ("communication", "size", "DeepEP buffer"),
    "mm_buffer": ("workspace", "size", "multimodal buffer"),
    "embedding_pool": ("communication", "size", "embedding pool"),
    "host_staging": ("workspace", "size", "host cache staging"),
    "capturer_device": ("workspace", "size", "routing recorder"),
    "staging_buffer": ("communication", "size", "disaggregation staging"),
    "page_interleave": ("workspace", "size", "sharded KV scratch"),
}
"""Device memory that a line names with its size: account, field, what it is."""

_HOST_EVENTS: Final[dict[str, tuple[str, str]]] = {
    "host_pool": ("kv_cache", "size"),
    "ple_table": ("embeddings", "size"),
    "engram_host": ("embeddings", "size"),
    "embedding_pool_host": ("embeddings", "size"),
    "capturer_host": ("routing_recorder", "size"),
}
_OLD_GRAPHS: Final = {"draft": "cuda_graphs/draft", "piecewise": "cuda_graphs/prefill"}
_STARTS_A_RANK: Final = frozenset({"load_weight_begin", "load_weight_end", "init_begin"})
_LEDGER_START: Final = frozenset({*_STARTS_A_RANK, "init_begin", "kv_pool", "state_pool", "pool_end"})
_CAPTURES: Final = frozenset({"graph_begin", "graph_begin_old", "graph_end", "graph_end_old"})
_SERVING: Final = frozenset({"prefill_batch", "decode_batch", "retraction"})
_FUNCTION_PHASES: Final[dict[str, str]] = {
    "load_model": "weights",
    "init_memory_pool": "pools",
    "alloc_memory_pool": "pools",
    "configure": "pools",
    "init_attention_backend": "warmup",
    "init_cublas": "warmup",
    "kernel_warmup": "warmup",
    "init_cuda_graphs": "graph_capture",
    "init_device_graphs": "graph_capture",
    "init_piecewise_cuda_graphs": "graph_capture",
    "capture": "graph_capture",
    "capture_one_batch_size": "graph_capture",
    "event_loop_normal": "serving",
    "event_loop_overlap": "serving",
    "forward_extend": "prefill",
    "forward_decode": "decode",
    "prepare_for_extend": "prefill",
    "prepare_for_decode": "decode",
    "_get_new_batch_prefill_raw": "prefill",
    "update_weights_from_disk": "serving",
}
"""Functions of SGLang's own code (managers/scheduler.py, model_executor/model_runner.py) and the phase they mean."""
_CUDA_BACKENDS: Final = frozenset(
    {"flashinfer", "fa3", "fa4", "flashmla", "trtllm_mha", "trtllm_mla", "cutlass_mla", "cutedsl_mla"}
)

LEAST_TOTAL: Final = 64 * MIB
"""No device is smaller: a total below this is none."""

RankKey = tuple[int | None, int | None, int]
_TOLD_TO_END: Final = frozenset({-15, -2, 143, 130})
"""Exit codes of a process that was asked to end (SIGTERM, SIGINT)."""


class FailedAllocation(NamedTuple):
    """What torch's message says of the device, and which rank printed it: by its label, or by its number in the job."""

    key: RankKey | None
    rank: int | None
    total_bytes: int
    gpu: int | None
    line: Evidence


class StartBuilder:
    """One start of one server in the making."""

    def __init__(self, label: str | None) -> None:
        self.label = label
        self.config = ConfigBuilder()
        self.versions = VersionRange()
        self.ranks: dict[tuple[int | None, int | None, int], RankBuilder] = {}
        self.usage: dict[int | None, UsageBuilder] = {}
        self.capacity: dict[int | None, dict[str, int]] = {}
        self.failures = FailureLog()
        self.spans: dict[int, list[int]] = {}
        self.started_at: str | None = None
        self.ended_at: str | None = None
        self.begun = False
        self.ready = False
        self.up = False
        self.stopped = False
        self.served = False
        self.notes: list[str] = []
        self.totals: list[int] = []
        self.totals_line: Evidence | None = None
        self.failed_allocations: list[FailedAllocation] = []
        self.failing: RankKey | None = None
        self.failed_ranks: set[RankKey] = set()
        self.cause = RootCause()
        self.scheduler_failed = False
        self.cause_told = False
        self.retry: Event | None = None
        self.terminated = False
        self.told = False
        """Whether a figure or a line with the engine's own prefix was read: words alone may be somebody's prose."""
        self.device_word: str | None = None
        self.rocm = False
        self.traceback_phase: str | None = None

    # ------------------------------------------------------------------ intake

    def touch(self, event: Event) -> None:
        """The start reaches to this line."""
        span = self.spans.setdefault(event.input, [event.line, event.line])
        span[0], span[1] = min(span[0], event.line), max(span[1], event.line)
        time = event.prefix.time if _is_date(event.prefix.time) else event.prefix.wrapper_time
        if time is not None:
            self.started_at = self.started_at or time
            self.ended_at = time

    def take(self, event: Event) -> None:
        """One event that belongs to this start."""
        self.touch(event)
        self.versions.see(event)
        self.told = self.told or _tells(event)
        kind = event.rule.kind
        if event.rule.framework == "any":
            self._take_any(event)
            return
        if event.id not in BEFORE_THE_DUMP and event.id != "server_args":
            self.begun = True
        if kind != "failure" and event.id != "traceback" and not self.scheduler_failed:
            # Whoever prints on has not died of the exception before.
            self.cause.forget()
            self.retry = None
        if event.id in _SERVING:
            self._serve(event)
        elif kind == "failure":
            self._fail(event)
        elif not self._take_rank_event(event):
            self._take_other(event)

    def _take_any(self, event: Event) -> None:
        if "HIP" in event.message[:200]:
            self.rocm = True
        if event.id == "http_started":
            self.ready = True
            self.up = self.up or bool(self.ranks)
        elif event.id == "http_stopped":
            self.stopped = True
        elif event.id in EXCEPTION_RULES:
            self._take_exception(event)
        elif event.id == "exception_detail":
            self.cause.detail(event)
        elif event.id == "alloc_retry":
            self.retry = event
        if event.rule.kind == "failure":
            self.begun = True
            self._fail(event)
            if (total := event.amount("total")) is not None:
                key = _key(event) if _labelled(event) else self.failing
                found = FailedAllocation(
                    key, event.prefix.ranks.get("rank"), total.bytes, event.count("gpu"), event.evidence
                )
                self.failed_allocations = [*self.failed_allocations, found][:MOST_FAILURES]

    def _take_exception(self, event: Event) -> None:
        """The end of a traceback that no rule about memory takes: the cause, should the server die of it."""
        if self.cause_told or is_wrapper(event) or (self.served and not self.scheduler_failed and is_requests(event)):
            return
        early = not self.ranks and not self.scheduler_failed
        level = 0 if self.scheduler_failed else 1
        self.cause.take(event, self.failing, level, self._phase(event), before_engine=early)

    def _fail(self, event: Event) -> None:
        if self.terminated and event.id in {"child_died", "killed"}:
            code = event.count("code") if event.count("code") is not None else event.count("code2")
            if code is None or code in _TOLD_TO_END:
                # The server was told to end, and its processes did.
                return
        if event.id == "scheduler_exception":
            self.scheduler_failed = True
            self.failing = _key(event) if _labelled(event) else self.failing
            if _labelled(event):
                self.rank(event)
                self.failed_ranks.add(_key(event))
        elif event.id == "child_died":
            self.cause_told = self.scheduler_failed
        self.failures.add(event, self._phase(event))
        fraction = event.number("fraction")
        if fraction is not None:
            self.config.fallback("memory_fraction", fraction)

    def _on_traceback(self, event: Event) -> None:
        function = event.word("function")
        if function == "run_scheduler_process":
            self.traceback_phase = None
        phase = _FUNCTION_PHASES.get(function or "")
        if phase is None and self.traceback_phase is None and "/mem_cache/" in event.message:
            # Nothing of the serving loop above it: the pools are being built.
            phase = "pools"
        if phase is not None:
            self.traceback_phase = phase

    def _phase(self, event: Event) -> str:
        if self.traceback_phase is not None and event.id != "scheduler_exception":
            return self.traceback_phase
        if self.served and not self._loading():
            return "serving"
        key = _key(event) if _labelled(event) else self.failing
        rank = self.ranks.get(key) if key is not None else None
        if rank is not None:
            return rank.phase()
        if key is not None and len(self.ranks) > 1:
            return "startup"
        phases = [r.phase() for r in self.ranks.values()]
        return phases[-1] if phases else "startup"

    def _loading(self) -> bool:
        return any(r.capturing for r in self.ranks.values())

    def _take_rank_event(self, event: Event) -> bool:
        handler = _RANK_EVENTS.get(event.id)
        if handler is not None:
            rank = self.rank(event)
            handler(rank, event)
            if event.id in {"state_pool", "checkpoint_pool", "replay_ring"}:
                self.config.hybrid = True
            return True
        if event.id in {"graph_end", "graph_end_old"}:
            self._graph_end(event)
            return True
        if event.id == "replay_ring":
            self.config.hybrid = True
            self.rank(event).replay_ring(event, self.config.speculative)
            return True
        if event.id in _DEVICE_EVENTS:
            account, field, what = _DEVICE_EVENTS[event.id]
            self.rank(event).take_device(account, event.amount(field), event, what=what)
            return True
        if event.id in _HOST_EVENTS:
            account, field = _HOST_EVENTS[event.id]
            self._host(event, account, event.amount(field))
            return True
        return False

    def _host(self, event: Event, account: str, amount: Amount | None) -> None:
        what = event.word("what") or event.word("label") or event.word("modality") or event.word("name")
        if event.id == "host_pool" and what and ("Mamba" in what or "state" in what):
            account = "recurrent_state"
        self.rank(event).host_memory(account, amount, event, what=what, tokens=event.count("tokens"))

    def _graph_end(self, event: Event) -> None:
        what, role = event.word("what") or "", event.word("role") or ""
        if event.id == "graph_end_old":
            account = next((a for word, a in _OLD_GRAPHS.items() if what.startswith(word)), "cuda_graphs/decode")
            if what.startswith("npu"):
                self.device_word = "npu"
        elif "draft" in role:
            account = "cuda_graphs/draft"
        else:
            account = "cuda_graphs/prefill" if what in {"prefill", "extend"} else "cuda_graphs/decode"
        self.rank(event).graph_end(event, account)

    def _take_other(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event.id}", None)
        if handler is not None:
            handler(event)
        self.config.take(event)

    def _on_init_begin(self, event: Event) -> None:
        self.rank(event)

    def _on_init_end(self, event: Event) -> None:
        rank = self.rank(event)
        if rank.init_usage is None:
            rank.init_usage = event.amount("usage")

    def _on_allreduce_buffers(self, event: Event) -> None:
        rank = self.rank(event)
        for field in ("symmetric", "local"):
            rank.take_device("communication", event.amount(field), event, what=f"all-reduce {field} buffer")

    def _on_dcp_pack(self, event: Event) -> None:
        size, count = event.amount("size"), event.count("count")
        if size is not None and count is not None:
            self.rank(event).take_device(
                "communication", size.scaled(count), event, what="context parallel pack buffers"
            )

    def _on_weight_cache(self, event: Event) -> None:
        self.rank(event).weights_elsewhere = True
        self.note("the weights are held by another process on the same GPU (weight cache)")

    def _on_load_weight_overlap(self, event: Event) -> None:
        self.rank(event).weights_seen += 1
        self.note("start-up overlap: the weights' size is not printed")

    def _on_mm_pool(self, event: Event) -> None:
        size = event.amount("size")
        if size is not None:
            self.note(
                f"the main process may hold up to {size.bytes // 2**20} MiB for multimodal features on the base GPU: another process, not in this ledger"
            )

    def _on_state_raised(self, event: Event) -> None:
        before, after = event.count("before"), event.count("slots")
        if before is not None and after is not None and after > before:
            self.note(
                f"state slots raised from {before} to {after} after the KV budget was computed: that memory is outside the budget"
            )

    def _on_graph_vit(self, event: Event) -> None:
        self.note("vision graphs are captured while serving, after the last free-memory reading")

    def _on_gpu_total(self, event: Event) -> None:
        totals = event.fields.get("total")
        if isinstance(totals, tuple):
            self.totals = [t.bytes for t in totals if isinstance(t, Amount)]
            self.totals_line = event.evidence

    def _on_ready(self, event: Event) -> None:
        self.ready = True
        self.up = self.up or bool(self.ranks)

    def _on_shutdown(self, event: Event) -> None:
        self.stopped = self.terminated = True

    def _on_capacity(self, event: Event) -> None:
        if _may_be_cut(event):
            return
        key = self._engine_key(event)
        known = self.capacity.setdefault(key, {})
        for field, name in (
            ("tokens", "kv_tokens"),
            ("requests", "max_running_requests"),
            ("context", "context_length"),
        ):
            if (value := tokens_of(event, field)) is not None:
                known[name] = value
        for field, name in (
            ("chunk", "chunked_prefill_tokens"),
            ("prefill", "max_prefill_tokens"),
            ("context", "context_length"),
        ):
            if (value := event.count(field)) is not None:
                self.config.set(name, value)
        if event.word("device") is not None:
            self.device_word = event.word("device")
        rank = self.rank(event) if (not self.ranks or _labelled(event) or len(self.ranks) == 1) else self._first_rank()
        rank.capacity(event)

    def _on_state_cap(self, event: Event) -> None:
        known = self.capacity.setdefault(self._engine_key(event), {})
        for field, name in (
            ("per_request", "slots_per_request"),
            ("slots", "state_slots"),
            ("requests", "capped_requests"),
        ):
            if (value := event.count(field)) is not None:
                known[name] = value
        self.config.hybrid = True

    def _on_requests_reduced(self, event: Event) -> None:
        self._soft_capacity(event, "requests", "capped_requests")

    _on_requests_final = _on_requests_reduced

    def _on_post_capture_tokens(self, event: Event) -> None:
        known = self.capacity.setdefault(self._engine_key(event), {})
        for field, name in (
            ("tokens", "kv_tokens"),
            ("full", "kv_tokens"),
            ("swa", "kv_swa_tokens"),
            ("requests", "capped_requests"),
        ):
            if (value := event.count(field)) is not None:
                known[name] = value

    def _on_dsv4_pools(self, event: Event) -> None:
        self._soft_capacity(event, "swa", "kv_swa_tokens")

    def _on_tokens_limited(self, event: Event) -> None:
        profiled = event.count("profiled")
        self.config.fallback("max_total_tokens", event.count("asked"))
        if profiled is not None and profiled < 0:
            self.failures.add(event, "pools", kind="kv_too_small")

    def _on_kv_pool_none(self, event: Event) -> None:
        rank = self.rank(event)
        if not rank.pool_groups_closed:
            rank.kv_tokens = tokens_of(event) or rank.kv_tokens

    def _soft_capacity(self, event: Event, field: str, name: str) -> None:
        if (value := event.count(field)) is not None:
            self.capacity.setdefault(self._engine_key(event), {})[name] = value

    def note(self, text: str) -> None:
        """A remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------ ranks and engines

    def rank(self, event: Event) -> RankBuilder:
        """The rank that printed this line. A single GPU's lines carry no label: TP 0."""
        key = _key(event)
        if not _labelled(event) and key not in self.ranks and len(self.ranks) == 1:
            key = next(iter(self.ranks))
        found = self.ranks.get(key)
        if found is None:
            found = self.ranks[key] = RankBuilder(key, event.prefix.ranks.get("ep"))
            found.host = event.prefix.host
        found.ep = event.prefix.ranks.get("ep", found.ep)
        found.order += 1
        return found

    def _first_rank(self) -> RankBuilder:
        found = self.ranks[min(self.ranks, key=_sort_key)]
        found.order += 1
        return found

    def _engine_key(self, event: Event) -> int | None:
        return event.prefix.ranks.get("dp")

    def _serve(self, event: Event) -> None:
        self.served = True
        self.usage.setdefault(self._engine_key(event), UsageBuilder()).take(event)
        rank = self.ranks.get(_key(event))
        if rank is not None:
            rank.serving = True
        if event.number("state") is not None:
            self.config.hybrid = True

    # ------------------------------------------------------------------ is it another start?

    def contradicts(self, event: Event) -> bool:
        """Whether this event can only belong to a later start than this one."""
        if event.id == "server_args":
            return self._new_dump(event)
        if event.id not in _LEDGER_START:
            return not self.config.dumped and self._of_next_run(event)
        rank = self.ranks.get(_key(event))
        if rank is None:
            # Every rank of a start has begun before its server is up; another label then is another start's.
            return bool(self.ranks) and (self.up or self.served)
        over = self.ready or self.served or bool(self.failures) or any(r.final for r in self.ranks.values())
        if event.id == "init_begin":
            return (
                rank.final is not None
                or rank.serving
                or (over and rank.weights_seen > 0 and not rank.draft_may_follow(self.config.speculative))
            )
        if rank.final is not None or rank.serving:
            return event.id in _STARTS_A_RANK or not self._late_pool(rank)
        if event.id in _STARTS_A_RANK and rank.weights_seen:
            return self._reload(rank, event, over)
        if event.id == "kv_pool" and not self.config.dumped:
            # A pasted comparison of two runs: the next one's pool is no draft's.
            return rank.repeats_pool(event) is False
        return False

    def _of_next_run(self, event: Event) -> bool:
        """A pasted comparison of two runs: the end of a start that has ended already, with other figures."""
        rank = self.ranks.get(_key(event))
        if rank is None or rank.final is None:
            return False
        if event.id == "capacity":
            return not _may_be_cut(event) and event.count("tokens") != rank.final.count("tokens")
        return event.id in _CAPTURES and rank.captured_before_end

    def _late_pool(self, rank: RankBuilder) -> bool:
        """Lines out of time order in a pasted excerpt: a pool after the capacity line of a rank that had none."""
        return not rank.pool_groups_closed and not rank.group

    def _reload(self, rank: RankBuilder, event: Event, over: bool) -> bool:
        """A second load on one rank: a draft's, or the same server again."""
        if event.id == "load_weight_end" and rank.begin_stage is not None:
            return False
        type_name = event.word("type")
        if type_name and DRAFT_TYPE.search(type_name):
            return False
        if self.config.speculative is False:
            return True
        if self.served or (over and self.config.speculative is None):
            return True
        free = event.amount("avail")
        if event.id == "load_weight_end" and free is not None and (usage := event.amount("usage")) is not None:
            free = free + usage
        if free is None or rank.first_free is None or rank.last_free is None:
            return type_name is not None and type_name == rank.target_type
        return abs(free.bytes - rank.first_free.bytes) < abs(free.bytes - rank.last_free.bytes)

    def is_node_of(self, event: Event) -> bool:
        """Whether a dump is another node's of this start: more than one node, another rank, all else the same."""
        text, mine = event.word("args") or "", self.config.text or ""
        nodes = as_int(self.config.argument("nnodes"))
        if nodes is None or nodes < 2 or self.served or self.up:
            return False
        return _node(text) != _node(mine) and _without_node(text) == _without_node(mine)

    def absorb(self, other: StartBuilder) -> None:
        """Take over the lines that another node printed before its dump."""
        for index, (first, last) in other.spans.items():
            span = self.spans.setdefault(index, [first, last])
            span[0], span[1] = min(span[0], first), max(span[1], last)

    def _new_dump(self, event: Event) -> bool:
        if not self.config.dumped:
            return (
                self.served or bool(self.failures) or any(r.readings or r.items or r.group for r in self.ranks.values())
            )
        text = event.word("args") or ""
        if text == self.config.text:
            return self.begun
        if self.begun:
            return True
        return _without_node(text) != _without_node(self.config.text or "")

    # ------------------------------------------------------------------ result

    def build(self) -> Server | None:
        """The start as a value; None where nothing of a server was seen."""
        if not self.spans or not self.told:
            return None
        for builder in self.ranks.values():
            builder.finish()
        if any(r.mla for r in self.ranks.values()):
            self.config.mla = True
        config = self.config.values()
        self._complete_config(config)
        engines = self._engines()
        facts_config = {**config}
        gpu = self._gpu(config)
        ranks = []
        for rank in self._told():
            capacity = self._rank_capacity(rank)
            device, total_lines = self._rank_gpu(gpu, rank)
            facts = RankFacts(
                facts_config,
                self.config.adjusted_fraction
                if self.config.adjusted_fraction is not None
                else config.get("memory_fraction"),
                device,
                capacity,
                self.config.speculative if self.config.speculative is not None else (True if rank.draft else None),
                self.config.hybrid,
                self.versions.bounds(self.config.version),
                self.failures.fatal,
                total_lines,
            )
            ranks.append(rank.build(facts, derive))
        notes = list(self.notes)
        for rank in self.ranks.values():
            notes.extend(n for n in rank.notes if n not in notes)
        return Server(
            framework="sglang",
            framework_version=self.config.version,
            model=self._model(),
            label=self.label,
            span=tuple(Span(i, a, b) for i, (a, b) in sorted(self.spans.items())),
            started_at=self.started_at,
            ended_at=self.ended_at,
            state=self._state(),
            config=config,
            ranks=tuple(ranks),
            engines=engines,
            usage=largest(self.usage.values(), _alike(r.capacity.state_slots for r in ranks)),
            failures=self._failures(),
            notes=tuple(notes),
        )

    def _failures(self) -> tuple[Failure, ...]:
        """All failures; the exception that the server died of first, where no line about memory is the cause.

        What only says that a process ended (or was ended for another's sake) stands in the phase of the cause.
        """
        found = list(self.failures.build())
        causes = [f for f in found if f.kind not in CONSEQUENCES]
        if not causes and self._state() == "failed":
            if self.retry is not None and not self.cause:
                causes = [allocation_failure(self.retry, found[0].phase if found else "startup")]
            elif (exception := self.cause.failure()) is not None:
                causes = [exception]
            found = [*causes, *found]
        if not causes:
            return tuple(found)
        phase = causes[0].phase
        return tuple(msgspec.structs.replace(f, phase=phase) if f.kind in CONSEQUENCES else f for f in found)

    def _told(self) -> list[RankBuilder]:
        """Ranks of which the log tells something, in order; one that only appears as a label is left out beside others."""
        ordered = [self.ranks[key] for key in sorted(self.ranks, key=_sort_key)]
        told = [r for r in ordered if r.items or r.readings or r.final is not None or r.key in self.failed_ranks]
        return told or ordered

    def _complete_config(self, config: dict[str, Any]) -> None:
        """What the pools' own lines say about configuration."""
        dtypes = [r.kv_dtype for r in self.ranks.values() if r.kv_dtype]
        if dtypes:
            config["kv_cache_dtype"] = dtypes[0]
        per_request = {c["slots_per_request"] for c in self.capacity.values() if "slots_per_request" in c}
        if len(per_request) == 1:
            config["state_slots_per_request"] = per_request.pop()
        short_conv = [
            i
            for r in self.ranks.values()
            for i in r.items
            if i.account == "recurrent_state/ssm" and i.amount.bytes == 0
        ]
        if short_conv and "linear_attention_kind" not in config:
            config["state_backend"] = "short_conv"
            for phase in ("prefill", "decode", "verify"):
                config.pop(f"linear_attention_backend_{phase}", None)

    def _model(self) -> str | None:
        path = self.config.argument("model_path")
        return path if isinstance(path, str) else None

    def _state(self) -> State:
        fatal = self.failures.fatal or (
            bool(self.cause) and not (self.ready or self.served or self.stopped) and (self.begun or self.config.dumped)
        )
        if fatal and not (self.stopped and self.served and not self.failures.memory):
            return "failed"
        if self.stopped:
            return "stopped"
        if self.ready or self.served:
            return "serving"
        return "starting" if self.begun or self.config.dumped else "unknown"

    def _gpu(self, config: dict[str, Any]) -> Gpu:
        device = config.get("device")
        kind: Literal["cuda", "rocm", "npu", "xpu", "musa", "cpu"] | None = None
        word = self.device_word
        if word in {"npu", "xpu", "cpu", "musa"}:
            kind = word  # type: ignore[assignment]
        elif device in {"npu", "xpu", "cpu", "musa"}:
            kind = device
        elif self.rocm or config.get("attention_backend_decode") == "aiter" or device in {"hip", "rocm"}:
            kind = "rocm"
        elif {config.get("attention_backend_prefill"), config.get("attention_backend_decode")} & _CUDA_BACKENDS:
            kind = "cuda"
        return Gpu(kind=kind)

    def _rank_gpu(self, gpu: Gpu, rank: RankBuilder) -> tuple[Gpu, tuple[Evidence, ...]]:
        """The device's total where a line prints it, with that line: for every device alike, or where an allocation failed."""
        if gpu.kind == "cpu":
            return gpu, ()
        total = self.totals[0] if self.totals and len(set(self.totals)) == 1 else None
        if total is not None and total < LEAST_TOTAL:
            total = None
        failed = self._failed_allocation(rank)
        if total is None and failed is not None and not self.totals:
            total = failed.total_bytes if failed.total_bytes >= LEAST_TOTAL else None
        line = self.totals_line if self.totals else failed.line if failed is not None else None
        # The line of totals stands only where the driver's tool has no figure, as on unified memory: with the total of such
        # a card it says which machine this is, though no line names it.
        unified = True if total is not None and self.totals and unified_total(total) else None
        index = failed.gpu if failed is not None else None
        known = Gpu(kind=gpu.kind, index=index, total_bytes=total, unified_memory=unified)
        return known, (line,) if line is not None else ()

    def _failed_allocation(self, rank: RankBuilder) -> FailedAllocation | None:
        """The allocation that failed on this rank: its own process printed it, or a server of one GPU did."""
        number = rank.tp if rank.dp is None and rank.pp is None else None
        own = [f for f in self.failed_allocations if f.key == rank.key or (f.rank is not None and f.rank == number)]
        if own:
            return own[0]
        sizes = [as_int(self.config.argument(n)) for n in ("tp_size", "pp_size", "dp_size")]
        if any(size not in (None, 1) for size in sizes) or len(self.ranks) > 1 or rank.key != (None, None, 0):
            return None
        alone = [f for f in self.failed_allocations if f.key is None]
        return alone[0] if len({(f.total_bytes, f.gpu) for f in alone}) == 1 else None

    # ------------------------------------------------------------------ capacity and usage per engine

    def _rank_capacity(self, rank: RankBuilder) -> Capacity:
        return self._capacity(rank.dp, [rank])

    def _engine_ranks(self, dp: int | None) -> list[RankBuilder]:
        return [r for r in self.ranks.values() if r.dp == dp or dp is None]

    def _capacity(self, dp: int | None, ranks: list[RankBuilder]) -> Capacity:
        """An engine's capacity: its own line, else that of the engines where all agree, else its ranks' pools."""
        known = dict(self._agreed())
        known.update(self.capacity.get(dp, {}))
        pools = ranks or list(self.ranks.values())
        pools = [*pools, *self._engine_ranks(dp)]
        tokens = known.get("kv_tokens", _first(r.kv_tokens for r in pools))
        slots = _first(r.state_slots for r in pools)
        per_request = known.get("slots_per_request")
        requests = known.get("max_running_requests", known.get("capped_requests"))
        slots = slots if slots is not None else known.get("state_slots")
        return Capacity(
            kv_tokens=tokens,
            kv_swa_tokens=known.get("kv_swa_tokens", _first(r.kv_swa_tokens for r in pools)),
            state_slots=slots,
            slots_per_request=per_request,
            max_running_requests=requests,
        )

    def _agreed(self) -> dict[str, int]:
        """Figures on which every engine's line agrees (under DP attention only one rank prints the line)."""
        lines = list(self.capacity.values())
        if not lines:
            return {}
        names = {n for line in lines for n in line}
        agreed: dict[str, int] = {}
        for name in names:
            values = {line[name] for line in lines if name in line}
            if len(values) == 1:
                agreed[name] = values.pop()
        return agreed

    def _engines(self) -> tuple[Engine, ...]:
        keys: set[int | None] = {r.dp for r in self.ranks.values()} | set(self.usage) | set(self.capacity)
        if len(keys) > 1:
            keys.discard(None)
        engines = []
        for dp in sorted(keys, key=lambda k: -1 if k is None else k):
            usage = self.usage.get(dp)
            capacity = self._capacity(dp, self._engine_ranks(dp))
            engines.append(
                Engine(dp=dp or 0, capacity=capacity, usage=(usage or UsageBuilder()).build(capacity.state_slots))
            )
        return tuple(engines)


def _labelled(event: Event) -> bool:
    return any(name in event.prefix.ranks for name in ("tp", "dp", "pp", "ep", "gpu"))


def _key(event: Event) -> tuple[int | None, int | None, int]:
    ranks = event.prefix.ranks
    return (ranks.get("dp"), ranks.get("pp"), ranks.get("tp", ranks.get("gpu", 0)))


def _may_be_cut(event: Event) -> bool:
    """A server's capacity line with its first figure only: cut off, perhaps in the figure (bench_one_batch prints it bare)."""
    return event.prefix.time is not None and event.count("requests") is None and event.amount("avail") is None


def _sort_key(key: tuple[int | None, int | None, int]) -> tuple[int, int, int]:
    return (-1 if key[0] is None else key[0], -1 if key[1] is None else key[1], key[2])


def _first(values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _tells(event: Event) -> bool:
    """Whether a line shows a server: by a figure, a failure, its arguments or the engine's prefix."""
    if event.rule.kind == "failure" or event.id == "server_args" or event.prefix.style == "sglang":
        return True
    return any(value is not None and value != () and not isinstance(value, str) for value in event.fields.values())


def _alike(values: Iterable[int | None]) -> int | None:
    """The value that all agree on."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _is_date(time: str | None) -> bool:
    return bool(time and re.match(r"\d{4}-\d\d-\d\d", time))


def _node(text: str) -> str | None:
    found = re.search(r"\bnode_rank'?[=:] ?(\d+)", text)
    return found.group(1) if found else None


def _without_node(text: str) -> str:
    """A dump without what differs between the nodes of one job or the processes of one launch."""
    return re.sub(
        r"'?\b(?:node_rank|random_seed|nccl_port|port|host|base_gpu_id|dist_init_addr)'?[=:] ?[^,)}]*", "", text
    )
