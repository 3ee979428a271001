"""The columns of a fleet's rows: one row per rank, with its name, type, unit and meaning (docs/fleet.md lists them)."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from memledger.ledger import ACCOUNTS

Kind = Literal["int", "float", "text", "texts", "bool"]
Row = dict[str, Any]
"""The values of one row by column name; a column that is absent is unknown (null)."""


class Column(msgspec.Struct, frozen=True):
    """One column. `unit` is empty where the value has none."""

    name: str
    kind: Kind
    unit: str
    meaning: str


TOP_ACCOUNTS: Final = tuple(dict.fromkeys(name.partition("/")[0] for name in ACCOUNTS))
"""The accounts of the device's ledger, each the sum of those under it."""

_STATUS = (
    "`ok`; `partial` (it could not be read to the end: `error` says why); `nothing_recognised`; `unreadable`; `time_limit`; "
    "`memory_limit`; `crashed`; `internal_error`"
)

_FILE: Final = (
    Column("file", "text", "", "absolute path or URL, secrets masked"),
    Column("file_bytes", "int", "bytes", "size as stored (before decompression)"),
    Column("status", "text", "", _STATUS),
    Column("error", "text", "", "one sentence where `status` is not `ok`"),
    Column("notes", "texts", "", "what was odd about reading the file"),
    Column("unrecognized_lines", "int", "lines", "lines that look like memory and that no rule took"),
    Column("starts", "int", "", "starts of servers in the file"),
)

_START: Final = (
    Column("start", "int", "", "which start, counted from 1; null for what belongs to none"),
    Column(
        "latest",
        "bool",
        "",
        "the last start of its server whose pools are known (else the last); what the table sums up",
    ),
    Column("framework", "text", "", "`sglang` or `vllm`"),
    Column("framework_version", "text", "", "as printed"),
    Column("model", "text", "", "as printed"),
    Column("label", "text", "", "compose service, pod or host where the log has it"),
    Column("state", "text", "", "`starting`, `serving`, `failed`, `stopped`, `unknown`"),
    Column("started_at", "text", "ISO 8601", "as the log prints it"),
    Column("ended_at", "text", "ISO 8601", "as the log prints it"),
    Column("tp_size", "int", "", "asked for; null where not printed"),
    Column("pp_size", "int", "", "asked for; null where not printed"),
    Column("dp_size", "int", "", "asked for; null where not printed"),
    Column("memory_fraction", "float", "fraction", "asked for; null where not printed"),
    Column("quantization", "text", "", "asked for; null where not printed"),
    Column("kv_cache_dtype", "text", "", "as in the JSON report's `config`"),
    Column("failures", "texts", "", "kinds of the failures that the log prints, one for each"),
    Column("oom_kinds", "texts", "", "kinds of the start's incidents (docs/oom.md), one for each incident"),
    Column("fatal_incidents", "int", "", "incidents that ended the server or a process of it"),
    Column("findings", "texts", "", "codes of the start's findings, sorted"),
)

_RANK: Final = (
    Column("rank", "text", "", "label: `TP0`, `DP1 TP3`, `pid 4242`"),
    Column("dp", "int", "", "null where nothing tells"),
    Column("pp", "int", "", "null where nothing tells"),
    Column("tp", "int", "", "null where nothing tells"),
    Column("ep", "int", "", "null where nothing tells"),
    Column("pid", "int", "", "null where nothing tells"),
    Column("host", "text", "", "null where nothing tells"),
    Column("gpu_kind", "text", "", "`cuda`, `rocm`, `npu`, `xpu`, `musa`, `cpu`"),
    Column("gpu", "text", "", "the device's name"),
    Column("gpu_index", "int", "", "null where nothing tells"),
    Column("gpu_total_bytes", "int", "bytes", "the device's memory"),
    Column("unified_memory", "bool", "", "whether the device shares the host's memory"),
)

_BALANCE: Final = (
    Column("opening_bytes", "int", "bytes", "what the ledger starts from: the card's total, or the first free reading"),
    Column("residual_bytes", "int", "bytes", "opening minus all accounts (`host_bytes` is not one of them), signed"),
    Column("residual_tolerance_bytes", "int", "bytes", "of the residual"),
    Column("verdict", "text", "", "`closed`, `unexplained`, `over_counted`, `open`"),
    Column("verdict_reason", "text", "", "why the ledger is open"),
    Column(
        "unexplained_bytes",
        "int",
        "bytes",
        "the residual where the verdict is `unexplained`, 0 where it is closed or over-counted",
    ),
    Column("host_bytes", "int", "bytes", "the ledger of host memory"),
)

_USE: Final = (
    Column("kv_tokens", "int", "tokens", "KV tokens reserved, as printed, per data-parallel engine"),
    Column("kv_peak_usage", "float", "fraction", "largest usage of the KV pool in any usage line of the rank's engine"),
    Column(
        "kv_pool_bytes",
        "int",
        "bytes",
        "the KV pools whole; a vLLM hybrid's pool with the recurrent state that lives in it",
    ),
    Column(
        "kv_never_used_bytes",
        "int",
        "bytes",
        "`kv_pool_bytes` x (1 - peak usage, rounded up); null without usage lines",
    ),
    Column("state_slots", "int", "slots", "recurrent state slots reserved (SGLang)"),
    Column("state_slots_needed", "int", "slots", "most that were needed at once, by usage lines"),
    Column("state_peak_usage", "float", "fraction", "largest usage of the state slots"),
    Column(
        "idle_state_bytes",
        "int",
        "bytes",
        "the slots that were never needed, as ML101 counts; null where a figure is missing",
    ),
    Column("max_running_requests", "int", "requests", "in effect, per data-parallel engine"),
    Column("peak_running_requests", "int", "requests", "most in any usage line of the rank's engine"),
    Column("peak_queued_requests", "int", "requests", "most in any usage line of the rank's engine"),
    Column("preemptions", "int", "", "of the rank's engine"),
    Column("retractions", "int", "", "of the rank's engine"),
)


def _accounts() -> tuple[Column, ...]:
    found: list[Column] = []
    for name in TOP_ACCOUNTS:
        found.append(Column(f"{name}_bytes", "int", "bytes", f"account `{name}` with all under it; null: no entry"))
        found.append(Column(f"{name}_tolerance_bytes", "int", "bytes", f"of `{name}_bytes`"))
    return tuple(found)


COLUMNS: Final = (*_FILE, *_START, *_RANK, *_BALANCE, *_accounts(), *_USE)
"""Every column, in the order of the files."""

NAMES: Final = frozenset(column.name for column in COLUMNS)

GROUPABLE: Final = tuple(
    column.name for column in COLUMNS if column.kind == "text" and column.name not in {"error", "verdict_reason"}
)
"""Columns that `--group-by` takes."""


def document() -> str:
    """The table of docs/fleet.md, in Markdown."""
    lines = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{c.name}` | {c.kind} | {c.unit} | {c.meaning} |" for c in COLUMNS]
    return "\n".join(lines) + "\n"
