"""What no SGLang line prints but arithmetic on its figures gives, or its source fixes for the backend that the log names.

One function per kind of entry, each returning `Item`s; `derive` runs them all. Nothing here may use a stage's own
remainder: an entry is derived from printed figures only, and an assumed constant is a range.
"""

from __future__ import annotations

from typing import Final

from memledger.frameworks.sglang_rank import Item, RankBuilder, RankFacts
from memledger.ledger import Evidence
from memledger.units import MIB, Amount

INT32: Final = 4
_ALL_BACKENDS: Final = ("attention_backend_prefill", "attention_backend_decode")

LARGER_WORKSPACE: Final = frozenset(
    {
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MiMoForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Models for which flashinfer's buffer is raised to 512 MiB (SGLang, layers/attention/flashinfer_backend.py, 0.4.5+)."""

WORKSPACE_MIB: Final[dict[str, tuple[int, int]]] = {
    "flashinfer": (384, 512),
    "trtllm_mha": (896, 1032),
    "trtllm_mla": (512, 534),
    "cutedsl_mla": (684, 684),
    "dsv4": (0, 128),
}
"""Range of what building an attention backend allocates, MiB.

SGLang layers/attention/*_backend.py, 0.4.5 to 0.5.23: flashinfer 384, raised to 512 for some models; trtllm_mha 512 (+ 8)
and, being built on flashinfer, its buffer too; trtllm_mla 128 or 150 and flashinfer's 384; cutedsl_mla 150 more. triton,
fa3, fa4, flashmla: no constant workspace.
"""
WRAPPERS_MIB: Final = 64
DETERMINISTIC_MIB: Final = 2048
"""flashinfer's workspace with deterministic inference (0.5.4 to 0.5.23)."""


def derive(rank: RankBuilder, facts: RankFacts) -> list[Item]:
    """Every derived and assumed entry of one rank."""
    return [*request_table(rank, facts), *old_speculative_state(rank, facts), *attention_workspace(rank, facts)]


def request_table(rank: RankBuilder, facts: RankFacts) -> list[Item]:
    """The table of request to token indices: `(R [+ 1]) x (context + 4 + draft tokens) x 4 bytes`.

    R rows up to 0.5.10, R + 1 from 0.5.11 (SGLang, mem_cache/memory_pool.py: ReqToTokenPool); a decode server of a
    disaggregated pair adds rows in advance: 2 x R up to 32 requests (0.5.12+), none before, else by environment.
    Where the version is not certain the tolerance covers both.
    """
    requests, context = facts.capacity.max_running_requests, facts.config.get("context_length")
    if requests is None or not isinstance(context, int) or context <= 0 or requests <= 0:
        return []
    if not rank.pool_groups_closed:
        return []
    draft_tokens = facts.config.get("speculative_draft_tokens") if facts.speculative else 0
    if facts.speculative and not isinstance(draft_tokens, int):
        draft_tokens = 0
    row = (context + 4 + int(draft_tokens or 0)) * INT32
    low, high = facts.version
    least = requests + (1 if low >= (0, 5, 11) else 0)
    most = requests + (0 if high < (0, 5, 11) else 1)
    asked = facts.config.get("max_running_requests")
    if isinstance(asked, int) and asked > requests and low < (0, 5, 10) and (facts.config.get("dp_size") or 1) > 1:
        # 0.5.9 and older size the table by the request, not by its share per data-parallel worker.
        most = asked + 1
        least = asked if high < (0, 5, 10) else least
    if facts.config.get("disaggregation_mode") == "decode" and high >= (0, 5, 12):
        most += 2 * requests if requests <= 32 else 0
        least += 2 * requests if requests <= 32 and low >= (0, 5, 12) else 0
    size = Amount((least + most) * row // 2, (most - least) * row // 2 + (most - least) * row % 2)
    formula = f"{least if least == most else f'{least} to {most}'} rows x ({context} + 4 + {int(draft_tokens or 0)}) x 4 bytes"
    evidence = (rank.final.evidence,) if rank.final is not None else ()
    return [Item("request_tables", size, "derived", "pools", _order_of(rank, "pools"), evidence, {"formula": formula})]


def old_speculative_state(rank: RankBuilder, facts: RankFacts) -> list[Item]:
    """0.5.2 allocates the intermediate states and prints none: `(slots + 1) x draft tokens x slot`, the printed pool times D."""
    draft_tokens = facts.config.get("speculative_draft_tokens")
    if not facts.speculative or not isinstance(draft_tokens, int) or rank.state_slots is not None:
        return []
    if any(i.account.startswith("recurrent_state/speculative") for i in rank.items):
        return []
    made = []
    for part in ("conv", "ssm"):
        for item in [i for i in rank.items if i.account == f"recurrent_state/{part}"]:
            detail = {"formula": f"printed {part} state x {draft_tokens} draft tokens"}
            made.append(
                Item(
                    f"recurrent_state/speculative_{part}",
                    item.amount.scaled(draft_tokens),
                    "derived",
                    item.stage,
                    item.order,
                    item.evidence,
                    detail,
                )
            )
    return made


def attention_workspace(rank: RankBuilder, facts: RankFacts) -> list[Item]:
    """What building the named attention backend allocates after the pools; only where a later reading can show it."""
    after = [r for r in rank.readings if r.stage.partition("/")[0] in {"warmup", "graphs", "final"}]
    if not after or not any(r.stage == "pools" for r in rank.readings) or facts.gpu.kind in {"cpu", "npu"}:
        return []
    names = {facts.config.get(name) for name in _ALL_BACKENDS} - {None}
    ranges = [WORKSPACE_MIB[str(name)] for name in names if name in WORKSPACE_MIB]
    if not ranges:
        return []
    least, most = max(low for low, _ in ranges), max(high for _, high in ranges)
    if "flashinfer" in names and rank.target_type is not None and (least, most) == WORKSPACE_MIB["flashinfer"]:
        least = most = 512 if rank.target_type in LARGER_WORKSPACE else 384
    if facts.config.get("deterministic") and "flashinfer" in names:
        least = most = DETERMINISTIC_MIB
    # Each wrapper of flashinfer adds an integer workspace of 8 MiB; how many there are is not in the log.
    size = Amount((least + most) * MIB // 2, ((most - least) // 2 or WRAPPERS_MIB) * MIB)
    detail = {"backend": ", ".join(sorted(str(n) for n in names)), "range_mib": [least, most]}
    evidence: tuple[Evidence, ...] = ()
    return [Item("workspace", size, "assumed", "warmup", _order_of(rank, "pools") + 1, evidence, detail)]


def _order_of(rank: RankBuilder, stage: str) -> int:
    """The order of the last reading of a stage (0: none), to place an entry that no line prints."""
    return rank.order_of(stage)
