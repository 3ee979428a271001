"""One SGLang rank in the making: events in order to free-memory readings, entries and stages.

Order of events (SGLang, model_executor/model_runner.py and its successors): up to 0.5.13 each runner loads, sizes its
pools and captures before the draft's runner starts; from 0.5.14 all weights come first, then all pools, then all
captures. Which line is the draft's follows from its position and its type name, never from the version.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from memledger.events import Event
from memledger.ledger import (
    CLOSED_SHARE,
    CONTRADICTION,
    Basis,
    Budget,
    Capacity,
    Entry,
    Evidence,
    Gpu,
    Rank,
    Reading,
    Residual,
    Stage,
    StageResidual,
    build_stages,
    close,
    entry,
    stage_base,
)
from memledger.units import GIB, Amount, total

DRAFT_TYPE: Final = re.compile(r"NextN|MTP|Eagle|EAGLE|DFlash|DSpark|DSPARK|Medusa|Draft", re.ASCII)
"""Class names of draft models (SGLang, speculative/ and models/*_nextn.py, *_mtp.py, *_eagle.py)."""

CANDIDATES: Final[dict[str, tuple[str, ...]]] = {
    "init": ("CUDA context", "communicators", "other processes"),
    "draft_weights": ("the draft's own embedding and head, given back when the target's are shared",),
    "pools": ("LoRA pool", "allocator index tensors", "rotary tables grown after loading", "request table"),
    "draft_pools": ("allocator index tensors", "the draft's own embedding and head, given back"),
    "warmup": (
        "attention workspaces",
        "cuBLAS and cuDNN handles",
        "kernels loaded on first use",
        "graph input buffers",
    ),
    "graphs": ("kernels loaded on first use", "memory given back between captures"),
    "final": (
        "torch's cached blocks (this reading is taken without emptying the cache)",
        "buffers of later subsystems",
    ),
}
"""What moves memory in a stage without a line of its own (formats of SGLang 0.2 to 0.5.23)."""


class Pool(NamedTuple):
    """One KV pool line of the group before a `Memory pool end`."""

    label: str | None
    tokens: int | None
    k: Amount | None
    v: Amount | None
    kv: Amount | None
    dtype: str | None
    evidence: Evidence


MOST_READINGS: Final = 250
"""Free-memory readings that are kept of one rank: a start has some dozens. Later ones take the place of the last."""

MOST_ITEMS: Final = 1000
"""Entries that are kept of one rank."""

_NEVER_NEGATIVE: Final = ("kv_cache/", "recurrent_state/", "workspace", "communication", "host/")
"""Accounts of printed sizes of allocations: a negative figure is a failed sum, no size."""
_POOL_ACCOUNTS: Final = ("kv_cache/", "recurrent_state/")
ACCOUNT_WORDS: Final = {
    "weights": "the weights",
    "kv_cache": "the KV cache",
    "recurrent_state": "the recurrent state",
    "cuda_graphs": "the CUDA graphs",
    "activations": "the activations",
    "workspace": "a workspace",
    "communication": "the communication buffers",
    "request_tables": "the request tables",
}
_WINDOW_PARTS: Final = frozenset({"kv_cache/k", "kv_cache/v", "kv_cache/swa_k", "kv_cache/swa_v"})


class Item(NamedTuple):
    """An entry to be, with its place in the order of events."""

    account: str
    amount: Amount
    basis: Basis
    stage: str
    order: int
    evidence: tuple[Evidence, ...]
    detail: dict[str, Any]


class RankFacts(NamedTuple):
    """What the start as a whole knows and a rank needs: see `sglang_derived`."""

    config: dict[str, Any]
    fraction: float | None
    gpu: Gpu
    capacity: Capacity
    speculative: bool | None
    hybrid: bool
    version: tuple[tuple[int, ...], tuple[int, ...]]
    failed: bool = False
    total_lines: tuple[Evidence, ...] = ()
    """Where the device's total stands."""


class RankBuilder:
    """Running figures of one rank of one start."""

    def __init__(self, key: tuple[int | None, int | None, int], ep: int | None) -> None:
        self.dp, self.pp, self.tp = key
        self.ep = ep
        self.host: str | None = None
        self.items: list[Item] = []
        self.readings: list[Reading] = []
        self._reading_orders: list[int] = []
        self.order = 0
        self.notes: list[str] = []
        self.begin: Amount | None = None
        self.begin_stage: str | None = None
        self.weights_seen = 0
        self.begins_seen = 0
        self.target_type: str | None = None
        self.type_is_draft = False
        self.last_free: Amount | None = None
        self.first_free: Amount | None = None
        self.pool_groups_closed = 0
        self.group: list[Pool] = []
        self.group_has_state = False
        self.swa_sizes: tuple[int, int] | None = None
        self.swa_total: Amount | None = None
        self.kv_tokens: int | None = None
        self.kv_swa_tokens: int | None = None
        self.kv_dtype: str | None = None
        self.state_slots: int | None = None
        self.mla = False
        self.unified = False
        self.capturing: str | None = None
        self.capture_before: Amount | None = None
        self.captured = 0
        self.final: Event | None = None
        self.by_subtraction: list[str] = []
        self.overflowed = False
        """Whether there were more readings or entries than are kept."""
        self.old_wording = False
        self.init_usage: Amount | None = None
        self.device_word: str | None = None
        self.before_load: list[tuple[str, Amount]] = []
        self.lora_before: tuple[Amount, Evidence] | None = None
        self.serving = False
        self.weights_elsewhere = False
        self.total: Amount | None = None

    # ------------------------------------------------------------------ small helpers

    @property
    def key(self) -> tuple[int | None, int | None, int]:
        """What tells this rank from the others of its start."""
        return (self.dp, self.pp, self.tp)

    @property
    def draft(self) -> bool:
        """Whether a draft model's weights were seen on this rank."""
        return any(i.account == "weights/draft" for i in self.items) or self.begin_stage == "draft_weights"

    def draft_may_follow(self, speculative: bool | None) -> bool:
        """Whether a draft's runner may still start on this rank."""
        return speculative is not False and self.final is None and not self.serving

    def phase(self) -> str:
        """Where in its life this rank stands, for failures."""
        if self.capturing is not None:
            return "graph_capture"
        if self.serving:
            return "serving"
        if self.final is not None:
            return "warmup"
        if self.pool_groups_closed:
            return "warmup"
        if self.weights_seen:
            return "pools"
        return "weights" if self.begins_seen else "startup"

    def read(self, stage: str, free: Amount, evidence: Evidence) -> None:
        """A free-memory reading that closes `stage`."""
        if self.first_free is None:
            self.first_free = free
        self.last_free = free
        if len(self.readings) >= MOST_READINGS:
            self.overflowed = True
            del self.readings[-1], self._reading_orders[-1]
        self.readings.append(Reading(stage, free, (evidence,)))
        self._reading_orders.append(self.order)

    def add(
        self, account: str, amount: Amount | None, event: Event, stage: str, *, basis: Basis = "logged", **detail: Any
    ) -> None:
        """An entry with this event as its evidence; nothing where the figure is not known."""
        if amount is not None and not (amount.bytes < 0 and account.startswith(_NEVER_NEGATIVE)):
            clean = {k: v for k, v in detail.items() if v is not None}
            self._keep(Item(account, amount, basis, stage, self.order, (event.evidence,), clean))

    def _keep(self, item: Item) -> None:
        if len(self.items) < MOST_ITEMS:
            self.items.append(item)
        else:
            self.overflowed = True

    def _subtracted(self, why: str) -> None:
        if why not in self.by_subtraction:
            self.by_subtraction.append(why)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def order_of(self, stage: str) -> int:
        """The place of the last reading of a stage in the order of events; 0 where there is none."""
        found = [o for r, o in zip(self.readings, self._reading_orders, strict=True) if r.stage == stage]
        return found[-1] if found else 0

    def take_device(self, account: str, amount: Amount | None, event: Event, **detail: Any) -> None:
        """Device memory named by its own line: an entry of the interval in which the line stands.

        Before the first reading it is part of what is in use at the start; while a capture runs it is part of that
        capture's fall; after the last reading of start-up no reading shows it. In these cases it is kept as a fact, not
        as an entry (the same bytes would count twice).
        """
        if amount is None:
            return
        if not self.readings and not self.begins_seen:
            if len(self.before_load) < MOST_ITEMS:
                self.before_load.append((str(detail.get("what", account)), amount))
        elif self.capturing is None and self.final is None and not self.serving:
            self.add(account, amount, event, self.next_stage(), **detail)
        else:
            self._note(f"{detail.get('what', account)} is inside a capture or taken after the last reading")

    def next_stage(self) -> str:
        """The stage whose closing reading comes next, as far as can be told."""
        if self.capturing is not None:
            return self._graph_stage()
        if not self.weights_seen:
            return "weights"
        if not self.pool_groups_closed:
            return "pools"
        if self.begin_stage == "draft_weights" and self.begin is not None:
            return "draft_weights"
        if self.draft and self.pool_groups_closed < 2:
            return "draft_pools"
        return "warmup" if not self.captured else self._after_graphs("warmup")

    def _after_graphs(self, name: str) -> str:
        """A second warm-up or capture, apart from the first by a draft's weights or pools between them."""
        bases = [r.stage for r in self.readings]
        if not any(b.startswith("graphs") for b in bases):
            return name
        last_graph = max(i for i, b in enumerate(bases) if b.startswith("graphs"))
        between = any(b.startswith(("draft_weights", "draft_pools")) for b in bases[last_graph:])
        if between or any(b == f"{name}/draft" for b in bases):
            return f"{name}/draft"
        return name

    def _graph_stage(self) -> str:
        return self._after_graphs("graphs")

    # ------------------------------------------------------------------ weights

    def is_draft_load(self, type_name: str | None) -> bool:
        """Whether the weights now read are a draft's: a second load on this rank, or a draft's class name after a load."""
        if self.weights_seen:
            return True
        return bool(type_name and DRAFT_TYPE.search(type_name) and (self.pool_groups_closed or self.captured))

    def load_begin(self, event: Event) -> None:
        """`Load weight begin`: the opening balance, or the start of a draft's load."""
        self._close_group()
        self.begins_seen += 1
        free = event.amount("avail")
        self.begin = free
        self.begin_stage = "draft_weights" if self.weights_seen else "weights"
        if free is not None:
            self.read("draft_weights" if self.weights_seen else "init", free, event.evidence)

    def load_end(self, event: Event) -> None:
        """`Load weight end`: printed usage, else begin minus end (0.4.3 and older)."""
        self._close_group()
        type_name, free, usage = event.word("type"), event.amount("avail"), event.amount("usage")
        draft = self.is_draft_load(type_name) or (self.begin_stage == "draft_weights")
        if not draft and type_name and DRAFT_TYPE.search(type_name) and self.begin is None:
            # A pasted excerpt that starts with the draft's line.
            draft = True
        stage = "draft_weights" if draft else "weights"
        account = "weights/draft" if draft else "weights/model"
        if not draft:
            self.target_type = type_name
        if usage is None and free is not None and event.word("dtype") is not None:
            self.old_wording = self.old_wording or not draft
        basis: Basis = "logged"
        if usage is None and free is not None and self.begin is not None:
            usage, basis = self.begin - free, "derived"
            self._subtracted("the weights' size is not printed and was taken from two readings")
        if self.begin is None and usage is not None and free is not None and not self.readings and not draft:
            # `mem usage` is the reading before minus the reading after, so the one before is known.
            self.read("init", free + usage, event.evidence)
        self.order += 1
        if self.weights_elsewhere and usage is not None and not draft:
            self._note("the weights are held by another process on the same GPU; the load's figure is not theirs")
        self.add(
            account,
            usage,
            event,
            stage,
            basis=basis,
            type=type_name,
            quantization=event.word("quant"),
            formula="free memory before minus after loading" if basis == "derived" else None,
        )
        if free is not None:
            self.read(stage, free, event.evidence)
        self.weights_seen += 1
        self.begin = None
        self.begin_stage = None

    # ------------------------------------------------------------------ pools

    def _pool_stage(self) -> str:
        return "pools" if not self.pool_groups_closed else "draft_pools"

    def _is_draft_group(self) -> bool:
        """Whether the pool lines now read are the draft's: a pool group of this rank was closed before."""
        return self.pool_groups_closed > 0

    def repeats_pool(self, event: Event) -> bool | None:
        """Whether a pool line after the closed group says what the group said; False where it is the next run's.

        None where it may be a draft's: smaller than the target's and, where it follows the target's capture (before
        0.5.14), of the target's token count.
        """
        target = [i for i in self.items if i.account in {"kv_cache/k", "kv_cache/v", "kv_cache/latent"}]
        found = [a for name in ("k", "v", "kv") if (a := event.amount(name)) is not None]
        size, known = sum(a.bytes for a in found), sum(i.amount.bytes for i in target)
        if not self.pool_groups_closed or self.draft or not found or not known:
            return None
        same_tokens = event.count("tokens") == self.kv_tokens
        if self.has_graphs:
            return False if size >= known or not same_tokens else None
        return True if size == known and same_tokens else None

    @property
    def has_graphs(self) -> bool:
        """Whether a capture of this rank was seen."""
        return any(i.account.startswith("cuda_graphs/") for i in self.items)

    @property
    def captured_before_end(self) -> bool:
        """Whether a capture of this rank stands before its capacity line, in the order of the log."""
        end = (self.final.input, self.final.line) if self.final is not None else (0, 0)
        graphs = [i for i in self.items if i.account.startswith("cuda_graphs/")]
        return any((e.input, e.line) < end for i in graphs for e in i.evidence)

    def kv_pool(self, event: Event) -> None:
        """A KV pool line; accounts are decided when the group is complete (two lines may be one sliding-window pool)."""
        if self.unified and not self._is_draft_group():
            return
        if self.repeats_pool(event):
            return
        if not any(_size(event, name) for name in ("k", "v", "kv")):
            # Cut off before the sizes: the count stands, the bytes are not known.
            if not self._is_draft_group():
                self.kv_tokens = tokens_of(event) or self.kv_tokens
                self.kv_dtype = event.word("dtype") or self.kv_dtype
            return
        if len(self.group) < MOST_ITEMS:
            self.group.append(_pool(event))
        else:
            self.overflowed = True

    def virtual_pool(self, event: Event) -> None:
        """Addresses only: neither bytes nor the token count is what the pool will have."""
        if (note := "the first KV pool line reserves addresses, not memory") not in self.notes:
            self.notes.append(note)

    def swa_sum(self, event: Event) -> None:
        """The sum line says which of the two pools before it is the sliding-window one."""
        swa, full = event.count("swa"), event.count("full")
        if swa is not None and full is not None and not self._is_draft_group():
            self.swa_sizes = (swa, full)
            self.kv_swa_tokens = swa
            if event.word("what") == "mem usage":
                self.swa_total = event.amount("total")

    def swa_tokens(self, event: Event) -> None:
        """Token counts of the two pools, printed before them (repeated by solver runs and the draft: the first stays until pools)."""
        swa, full = event.count("swa"), event.count("full")
        if swa is None or self._is_draft_group():
            return
        self.kv_swa_tokens = swa
        if full is not None:
            self.swa_sizes = (swa, full)

    def state_pool(self, event: Event) -> None:
        """The recurrent state's own line: exact tensor sizes, the padding slot included."""
        slots = event.count("slots")
        if slots is not None:
            self.state_slots = slots
        self.group_has_state = True
        if self.unified:
            return
        stage = self._pool_stage()
        for field, account in (
            ("conv", "conv"),
            ("ssm", "ssm"),
            ("spec_ssm", "speculative_ssm"),
            ("spec_conv", "speculative_conv"),
        ):
            rows = slots + 1 if slots is not None and not account.startswith("speculative") else None
            self.add(f"recurrent_state/{account}", event.amount(field), event, stage, rows=rows, slots=slots)

    def replay_ring(self, event: Event, speculative: bool | None) -> None:
        """Replay rings stand beside the state; with speculation they replace the intermediate ssm states."""
        spec = speculative or event.word("fold") == "True" or event.amount("rawv") is not None
        account = "recurrent_state/speculative_ssm" if spec else "recurrent_state/ssm"
        for part in ("d", "k", "g", "rawv", "rawk", "beta"):
            self.add(account, event.amount(part), event, self._pool_stage(), replay_ring=part)

    def checkpoint_pool(self, event: Event) -> None:
        """int8 copies of cached states, taken after the KV pool."""
        for part, account in (("qdata", "ssm"), ("scale", "ssm"), ("conv", "conv")):
            self.add(
                f"recurrent_state/{account}",
                event.amount(part),
                event,
                self._pool_stage(),
                checkpoint=part,
                checkpoint_slots=event.count("slots"),
            )

    def unified_pool(self, event: Event) -> None:
        """One buffer for KV and state: counted once, its partitions are not."""
        self.unified = True
        self.add(
            "kv_cache/pool",
            event.amount("size"),
            event,
            self._pool_stage(),
            shared="KV and state or sliding-window tokens",
        )

    def unified_slots(self, event: Event) -> None:
        """Upper bounds of the pools that share the buffer."""
        self.kv_tokens = tokens_of(event) or tokens_of(event, "full") or self.kv_tokens
        self.kv_swa_tokens = event.count("swa") or self.kv_swa_tokens
        self.state_slots = event.count("slots") or self.state_slots

    def pool_end(self, event: Event) -> None:
        """Free memory after one model's pools: closes its group of pool lines."""
        stage, before = self._pool_stage(), self.pool_groups_closed
        self._close_group(ended=True)
        if self.old_wording and stage == "pools" and not any(i.stage == "pools" for i in self.items):
            self._old_pool(event)
        if (free := event.amount("avail")) is not None:
            self.read(stage, free, event.evidence)
        self.pool_groups_closed = before + 1

    def _old_pool(self, event: Event) -> None:
        """0.2 to 0.4.1 print no pool size (nor 0.4.2 to 0.4.5 for MLA): two readings give it, and leave no remainder."""
        free = event.amount("avail")
        before = next((r.free for r in reversed(self.readings) if r.stage == "weights"), None)
        if free is None or before is None:
            return
        self._subtracted("the KV pool's size is not printed and was taken from two readings")
        self.add(
            "kv_cache/pool",
            before - free,
            event,
            "pools",
            basis="derived",
            formula="free memory after loading minus after the pools",
        )

    def _close_group(self, *, ended: bool = False) -> None:
        """Give the pool lines of one model their accounts. `ended`: a `Memory pool end` closes the group."""
        group, self.group = self.group, []
        if not group:
            return
        if self._is_draft_group():
            self._draft_pools(group)
            return
        extra: list[Pool] = []
        if (
            not ended
            and self.draft
            and len(group) > 1
            and self.swa_sizes is None
            and len({p.tokens for p in group}) == 1
        ):
            # Without a line between them: a draft's pool has the target's token count.
            group, extra = group[:1], group[1:]
        swa = _swa_index(group, self.swa_sizes)
        main = [p for i, p in enumerate(group) if i not in swa]
        for index, pool in enumerate(group):
            self._target_pool(pool, index in swa)
        first = next((p for p in main if not _is_index(p)), main[0] if main else group[0])
        tokens = first.tokens
        if not main and self.swa_sizes is not None:
            # An excerpt with the sliding-window pool's line only.
            tokens = self.swa_sizes[1]
        self.kv_tokens = tokens if tokens is not None else self.kv_tokens
        self.kv_dtype = first.dtype or self.kv_dtype
        if swa and self.kv_swa_tokens is None:
            self.kv_swa_tokens = group[next(iter(swa))].tokens
        self.pool_groups_closed += 1
        self._draft_pools(extra)

    def _target_pool(self, pool: Pool, sliding: bool) -> None:
        detail = {"tokens": pool.tokens, "dtype": pool.dtype, "label": pool.label}
        if pool.kv is not None:
            self.mla = True
            self._pool_item("kv_cache/latent", pool.kv, pool, detail)
            return
        if _is_index(pool):
            self._pool_item("kv_cache/index", pool.k, pool, detail)
            if pool.v is not None and pool.v.bytes:
                self._pool_item("kv_cache/index", pool.v, pool, detail)
            return
        prefix = "kv_cache/swa_" if sliding else "kv_cache/"
        self._pool_item(f"{prefix}k", pool.k, pool, detail)
        self._pool_item(f"{prefix}v", pool.v, pool, detail)

    def _draft_pools(self, group: list[Pool]) -> None:
        for pool in group:
            for part, amount in (("k", pool.k), ("v", pool.v), ("kv", pool.kv)):
                detail = {"tokens": pool.tokens, "dtype": pool.dtype, "label": pool.label, "part": part}
                self._pool_item("kv_cache/draft", amount, pool, detail)

    def _pool_item(self, account: str, amount: Amount | None, pool: Pool, detail: dict[str, Any]) -> None:
        if amount is not None:
            clean = {k: v for k, v in detail.items() if v is not None}
            self._keep(Item(account, amount, "logged", self._pool_stage(), self.order, (pool.evidence,), clean))

    def post_capture(self, event: Event) -> None:
        """The pool as really backed after capture: replaces what was only a reservation of addresses."""
        self._close_group()
        kv, draft = event.amount("kv"), event.word("draft") is not None
        if draft:
            self.items = [i for i in self.items if i.account != "kv_cache/draft"]
            self.add("kv_cache/draft", kv, event, "final", tokens=event.count("tokens"))
        else:
            self.items = [
                i for i in self.items if not i.account.startswith("kv_cache/") or i.account == "kv_cache/draft"
            ]
            self.kv_tokens = tokens_of(event) or self.kv_tokens
            self.kv_dtype = event.word("dtype") or self.kv_dtype
            self.add("kv_cache/pool", kv, event, "final", tokens=event.count("tokens"))
        if (free := event.amount("avail")) is not None:
            self.read("final", free, event.evidence)

    # ------------------------------------------------------------------ graphs

    def graph_begin(self, event: Event) -> None:
        """The reading before a capture closes the warm-up, or stands between two captures."""
        free = event.amount("avail")
        self._close_group()
        if free is not None:
            self._before_capture(free, event)
        self.capture_before = free
        self.capturing = event.word("what") or event.word("role") or "graph"

    def _before_capture(self, free: Amount, event: Event) -> None:
        graphs = self._graph_stage()
        last = self.readings[-1].stage if self.readings else None
        self.read(graphs if last == graphs else self._after_graphs("warmup"), free, event.evidence)

    def graph_end(self, event: Event, account: str) -> None:
        """The fall of free memory over one capture."""
        free = event.amount("avail") or event.amount("avail2")
        usage = event.amount("usage") or event.amount("usage2")
        basis: Basis = "logged"
        self._close_group()
        if usage is None and free is not None and self.capture_before is not None:
            usage, basis = self.capture_before - free, "derived"
            self._subtracted("a capture's size is not printed and was taken from two readings")
        if self.capture_before is None and free is not None and usage is not None and self.readings:
            # `mem usage` is the reading before minus the reading after, so the one before is known.
            self._before_capture(free + usage, event)
        self.order += 1
        self.add(
            account, usage, event, self._graph_stage(), basis=basis, runner=event.word("what") or event.word("role")
        )
        if free is not None:
            self.read(self._graph_stage(), free, event.evidence)
        self.captured += 1
        self.capturing = None
        self.capture_before = None

    def adaptive_graphs(self, event: Event) -> None:
        """Further graphs for adaptive speculation."""
        self.add("cuda_graphs/draft", event.amount("usage"), event, self._graph_stage(), runner="adaptive")

    # ------------------------------------------------------------------ end of start-up

    def capacity(self, event: Event) -> None:
        """The line with free memory after everything."""
        self._close_group()
        self.final = event
        self.capturing = None
        if (word := event.word("device")) is not None:
            self.device_word = word
        if (free := event.amount("avail")) is not None:
            self.read("final", free, event.evidence)

    def lora(self, event: Event) -> None:
        """Free memory around one adapter: adapters live on the host first, so the fall is mostly nothing."""
        free = event.amount("avail")
        if (
            free is None
            or event.word("what") != "loading"
            or self.final is not None
            or self.serving
            or not self.readings
        ):
            return
        if event.word("when") == "starts":
            self.lora_before = (free, event.evidence)
        elif self.lora_before is not None:
            taken = self.lora_before[0] - free
            if not taken.is_zero():
                self.add(
                    "weights/lora",
                    taken,
                    event,
                    self.next_stage(),
                    basis="derived",
                    formula="free memory before minus after",
                )
                self._subtracted("an adapter's size was taken from two readings")
            self.lora_before = None

    def host_memory(self, account: str, amount: Amount | None, event: Event, **detail: Any) -> None:
        """Host memory: a ledger of its own."""
        self.add(f"host/{account}", amount, event, "final", **detail)

    def finish(self) -> None:
        """No more events: pool lines without a line that closes their group get their accounts."""
        self._close_group()

    # ------------------------------------------------------------------ building

    def build(self, facts: RankFacts, derive: Callable[[RankBuilder, RankFacts], list[Item]]) -> Rank:
        """The rank as a value. `derive` adds what no line prints."""
        cpu = facts.gpu.kind == "cpu"
        items = [*self.items, *derive(self, facts)]
        if cpu and facts.failed:
            items = self._without_unfinished_pools(items)
        gpu, opening, readings, base = self._opening(facts, cpu)
        items = [_with_index(i, facts) for i in items]
        entries = [self._entry(i, readings) for i in self._with_contradiction(items)]
        if base == "device" and opening is not None and self.first_free is not None:
            entries.insert(0, self._in_use(opening))
        free = self._free()
        # A reading older than the last allocation says nothing about what is free after it.
        if free is not None and not self._after_last_reading(items):
            entries.append(free)
        stages, residual = self._balance(entries, items, opening, readings, base, facts)
        stages = (*stages, *self._unfinished())
        if cpu:
            entries = [_hosted(e) for e in entries]
            stages, residual = (
                (),
                Residual(None, None, None, "open", None, "the server runs on a CPU: its memory is the host's"),
            )
        return Rank(
            dp=self.dp,
            pp=self.pp,
            tp=self.tp,
            ep=self.ep,
            host=self.host,
            gpu=gpu,
            budget=self._budget(facts),
            entries=tuple(entries),
            stages=stages,
            residual=residual,
            capacity=facts.capacity,
        )

    def _without_unfinished_pools(self, items: list[Item]) -> list[Item]:
        """The entries without pools after which no reading came.

        Host memory is taken page by page as it is written: the line of a pool's allocation comes before its memory does.
        """
        late = {id(i) for i in self._after_last_reading(items) if i.account.startswith(_POOL_ACCOUNTS)}
        if late:
            size = total([i.amount for i in items if id(i) in late])
            self.notes.append(
                f"a pool of {size.bytes / 2**30:.2f} GiB was announced, but the process died before it was in place: not counted"
            )
        return [i for i in items if id(i) not in late]

    def _with_contradiction(self, items: list[Item]) -> list[Item]:
        """The sum line of the two sliding-window pools beside its parts, where they do not agree."""
        parts = [i for i in items if i.account in _WINDOW_PARTS]
        if self.swa_total is None or len({i.account for i in parts}) != len(_WINDOW_PARTS):
            return items
        if (total([i.amount for i in parts]) - self.swa_total).is_zero():
            return items
        marked = parts[0]._replace(detail={**parts[0].detail, "contradicted_bytes": self.swa_total.bytes})
        return [marked if i is parts[0] else i for i in items]

    def _opening(self, facts: RankFacts, cpu: bool) -> tuple[Gpu, Reading | None, list[Reading], Any]:
        """The opening balance and the readings after it: the device's total where known, else the reading before loading."""
        first = self.readings[0] if self.readings else None
        whole = first is not None and first.stage == "init"
        total = facts.gpu.total_bytes
        if total is not None and whole and first is not None and not cpu and total >= first.free.bytes:
            return facts.gpu, Reading("init", Amount(total), facts.total_lines), list(self.readings), "device"
        if whole and first is not None:
            return facts.gpu, first, self.readings[1:], "first_reading"
        return facts.gpu, None, list(self.readings), None

    def _in_use(self, opening: Reading) -> Entry:
        first = self.readings[0]
        taken = Amount(opening.free.bytes - first.free.bytes, 0)
        detail: dict[str, Any] = {"formula": "device total minus the first free reading"}
        if self.init_usage is not None:
            detail["distributed_initialisation_bytes"] = self.init_usage.bytes
        for name, amount in self.before_load:
            detail.setdefault("printed_before_loading", {})[name] = amount.bytes
        return entry("in_use_at_start", taken, "derived", stage="init", evidence=first.evidence, **detail)

    def _entry(self, item: Item, readings: list[Reading]) -> Entry:
        """An entry in its stage; where no reading closes that stage, in the one whose reading comes next in time."""
        stage = item.stage
        names = {r.stage for r in readings}
        if names and stage not in names and not item.account.startswith("host/"):
            later = [
                r.stage for r, order in zip(self.readings, self._reading_orders, strict=True) if order >= item.order
            ]
            later = [s for s in later if s in names]
            stage = later[0] if later else readings[-1].stage
        return entry(item.account, item.amount, item.basis, stage=stage, evidence=item.evidence, **item.detail)

    def _free(self) -> Entry | None:
        """Free memory after start-up: the capacity line's figure, else the last reading, which is named."""
        if not self.readings:
            return None
        last = self.readings[-1]
        printed = self.final is not None and self.final.amount("avail") is not None and last.stage == "final"
        which = f"available_{self.device_word or 'gpu'}_mem" if printed else f"last reading ({last.stage})"
        return entry("free", last.free, "logged", evidence=last.evidence, reading=which)

    def _balance(
        self,
        entries: list[Entry],
        items: list[Item],
        opening: Reading | None,
        readings: list[Reading],
        base: Any,
        facts: RankFacts,
    ) -> tuple[tuple[Stage, ...], Residual]:
        if opening is None:
            reason = "the reading before loading is not in the log" if readings else None
            return self._late_stages(items, readings), close(None, None, entries, open_reason=reason)
        if not readings:
            return (), close(None, None, entries, open_reason="only one free-memory reading is in the log")
        late = self._after_last_reading(items)
        if late:
            counted = [self._entry(i, readings) for i in items if i not in late and not i.account.startswith("host/")]
            head = [e for e in entries if e.account == "in_use_at_start"]
            stages = build_stages(opening, readings, [*head, *counted], CANDIDATES)
            names = " and ".join(dict.fromkeys(ACCOUNT_WORDS[i.account.partition("/")[0]] for i in late))
            return stages, close(None, None, entries, open_reason=f"no free-memory reading after {names}")
        counted = [e for e in entries if e.account != "free"]
        stages = build_stages(opening, readings, counted, CANDIDATES)
        reason = self._contradiction(items, facts) or self._open_reason(readings) or self._missing_lines(items, facts)
        residual = close(
            base,
            opening.free,
            entries,
            open_reason=reason,
            unified_memory=bool(facts.gpu.unified_memory),
            evidence=opening.evidence,
        )
        return stages, residual

    def _unfinished(self) -> tuple[Stage, ...]:
        """A load whose end is not in the log: its start is known, nothing can remain of it."""
        if self.begin_stage != "weights" or self.begin is None or len(self.readings) != 1:
            return ()
        return (Stage(self.begin_stage, self.begin.bytes, None, StageResidual(None, None)),)

    def _after_last_reading(self, items: list[Item]) -> list[Item]:
        """Printed entries of an interval that no reading closes: nothing can be balanced against them."""
        last = self._reading_orders[-1] if self._reading_orders else 0
        return [i for i in items if i.order > last and i.basis == "logged" and not i.account.startswith("host/")]

    def _missing_lines(self, items: list[Item], facts: RankFacts) -> str | None:
        """Weights and pools that exist and whose lines are not in the log (a condensed excerpt)."""
        accounts = {i.account.partition("/")[0] for i in items}
        if "weights" not in accounts and self.begin is not None and self.begin_stage == "weights":
            return "the weights' own line is not in the log"
        if "kv_cache" not in accounts and (facts.capacity.kv_tokens or 0) > 0:
            return "the KV pool's own line is not in the log"
        # The state of a unified pool lies in its one buffer and has no line of its own.
        if (
            "recurrent_state" not in accounts
            and not self.unified
            and (facts.hybrid or facts.capacity.state_slots is not None)
        ):
            return "the recurrent state's own line is not in the log"
        return None

    def _contradiction(self, items: list[Item], facts: RankFacts) -> str | None:
        """Why the printed figures cannot all be true: a free reading or an entry larger than the device, or negative."""
        whole = facts.gpu.total_bytes
        for reading in self.readings:
            free = reading.free
            if free.bytes < -free.tolerance:
                return f"{CONTRADICTION}{free.bytes / GIB:.2f} GiB free"
            if whole is not None and free.bytes > whole + free.tolerance:
                return f"{CONTRADICTION}{free.bytes / GIB:.2f} GiB free on a device of {whole / GIB:.2f} GiB"
        for item in items:
            account, size = item.account, item.amount
            if account.startswith("weights/") and item.basis == "logged" and size.bytes < -size.tolerance - GIB:
                return f"{CONTRADICTION}weights of {size.bytes / GIB:.2f} GiB"
            if whole is None or account.startswith("host/"):
                continue
            if size.bytes - whole > size.tolerance + CLOSED_SHARE * whole:
                return f"{CONTRADICTION}{account} of {size.bytes / GIB:.2f} GiB on a device of {whole / GIB:.2f} GiB"
        return None

    def _open_reason(self, readings: list[Reading]) -> str | None:
        if self.overflowed:
            return f"the log holds more memory figures of one start of this rank than a start prints (over {MOST_READINGS})"
        if self.by_subtraction:
            return self.by_subtraction[0]
        if not any(r.stage not in {"init", "weights", "draft_weights"} for r in readings):
            return "the log holds no free-memory reading after the pools"
        return None

    def _late_stages(self, items: list[Item], readings: list[Reading]) -> tuple[Stage, ...]:
        """Stages of a log that starts late: the first interval has no known start and no remainder."""
        if not readings:
            return ()
        head = readings[0].stage
        group = next((i for i, r in enumerate(readings) if r.stage != head), len(readings))
        last = readings[group - 1]
        start = self._reading_orders[self.readings.index(last)]
        later = [self._entry(i, readings[group:]) for i in items if i.order >= start and i.stage != head]
        later = [e for e in later if not e.account.startswith("host/")]
        first = Stage(stage_base(head), None, last.free.bytes, StageResidual(None, None))
        return (first, *build_stages(last, readings[group:], later, CANDIDATES))

    def _budget(self, facts: RankFacts) -> Budget:
        """`rest = free - pre x (1 - fraction)`: the fraction is of the memory free before loading, not of the card."""
        first = self.readings[0] if self.readings else None
        if facts.fraction is None or first is None or first.stage != "init":
            return Budget()
        pre = first.free.bytes
        static = round(pre * facts.fraction)
        return Budget(
            static_bytes=static,
            slack_bytes=pre - static,
            rule=f"mem_fraction_static {facts.fraction:g} of the {pre / 2**30:.2f} GiB free before loading: weights, KV cache and "
            "state inside it; graphs, workspaces and activations in the rest",
        )


def tokens_of(event: Event, name: str = "tokens") -> int | None:
    """A printed count of tokens; a negative one is a failed sum, no count."""
    found = event.count(name)
    return found if found is not None and found >= 0 else None


def _size(event: Event, name: str) -> Amount | None:
    found = event.amount(name)
    return found if found is not None and found.bytes >= 0 else None


def _pool(event: Event) -> Pool:
    return Pool(
        event.word("label"),
        tokens_of(event),
        _size(event, "k"),
        _size(event, "v"),
        _size(event, "kv"),
        event.word("dtype"),
        event.evidence,
    )


def _with_index(item: Item, facts: RankFacts) -> Item:
    """DSA prints latent and index keys as one figure from 0.5.4 (0.5.3 prints the latent part only)."""
    sparse = any(
        facts.config.get(f"{n}_backend_{p}") in {"dsa"} for n in ("attention", "mla") for p in ("prefill", "decode")
    )
    sparse = sparse or "sparse_mla_backend_decode" in facts.config
    if not sparse or item.account not in {"kv_cache/latent", "kv_cache/draft"} or facts.version[1] <= (0, 5, 3):
        return item
    return item._replace(detail={**item.detail, "includes_index": True})


def _is_index(pool: Pool) -> bool:
    return bool(pool.label and "index" in pool.label.lower())


def _swa_index(group: list[Pool], sizes: tuple[int, int] | None) -> set[int]:
    """Which lines of a group are the sliding-window pool: by label, by the printed token counts, else the first of two.

    SGLang builds the sliding-window pool before the full one (mem_cache/swa_memory_pool.py, 0.4.10 to 0.5.23).
    """
    labelled = {i for i, p in enumerate(group) if p.label and p.label.strip().upper().startswith("SWA")}
    if labelled:
        return labelled
    plain = [i for i, p in enumerate(group) if not p.label]
    if len(plain) < 2:
        if sizes is not None and sizes[0] != sizes[1] and len(plain) == 1 and group[plain[0]].tokens == sizes[0]:
            return {plain[0]}
        return set()
    if sizes is None:
        tokens = {group[i].tokens for i in plain}
        return {plain[0]} if len(plain) == 2 and len(tokens) == 2 else set()
    swa, full = sizes
    if swa == full:
        return {plain[0]}
    return {i for i in plain if group[i].tokens == swa}


def _hosted(row: Entry) -> Entry:
    """The same row in the host's ledger (a CPU build)."""
    account = row.account if row.account.startswith("host/") else f"host/{row.account}"
    return Entry(account, row.bytes, row.tolerance_bytes, row.basis, row.detail, row.evidence, row.stage)
