"""A server without a log: its ledger from what its port answers, its command line and the model's arithmetic, as far as they go.

What the engine itself measured is `live`, what follows from the architecture `modelled`; what neither gives is said to be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memledger import __version__
from memledger.frameworks.arguments import as_float, as_int
from memledger.ledger import (
    Capacity,
    Concurrency,
    Engine,
    Entry,
    Gpu,
    Rank,
    Report,
    Residual,
    Server,
    Source,
    Usage,
    entry,
)
from memledger.live import titles
from memledger.live.placement import WORKERS
from memledger.live.sample import LiveServer, Metrics, Process, Sample
from memledger.model.architecture import Architecture, NotModelledError
from memledger.model.find import Found, ModelConfigError, find
from memledger.units import GIB, Amount

_GB_DIGITS: Final = GIB // 2000
"""SGLang's answers give GiB with three decimals (`memory_usage`), rounded."""

NO_LOG: Final = "no log: rebuilt from the server's answers, its command line and the model's arithmetic"


def report(
    live: LiveServer, sample: Sample, *, model_config: Path | None = None, read: Report | None = None, why: str = ""
) -> Report:
    """The report on a running server without a log.

    Args:
        live: the server as sampled.
        sample: the machine (for the kind of its devices).
        model_config: the model's config.json, where the user gave it.
        read: the report on a log that holds no start (it was rotated): its peaks of use stay.
        why: why the log that was found says nothing.
    """
    found, problem = _architecture(live, model_config)
    reason = why or live.log.advice or "no log was found"
    server = _server(live, sample, found.architecture if found is not None else None)
    model = (
        Source("model", "unavailable", problem or "no model is known")
        if found is None
        else Source("model", "ok" if found.architecture is not None else "unavailable", found.how)
    )
    if read is not None and read.servers:
        last = read.servers[-1]
        server = msgspec.structs.replace(server, usage=last.usage, failures=last.failures, ended_at=last.ended_at)
    status: Literal["partial", "unavailable"] = "partial" if read is not None and read.servers else "unavailable"
    sources = (Source("log", status, reason), model)
    return Report(__version__, read.inputs if read is not None else (), sources, (server,))


def _architecture(live: LiveServer, model_config: Path | None) -> tuple[Found | None, str | None]:
    try:
        return find(live.model, config=model_config, look_here=True), None
    except ModelConfigError as error:
        return None, f"--model-config: {error}"


def _server(live: LiveServer, sample: Sample, arch: Architecture | None) -> Server:
    config = _config(live)
    usage = Usage()
    engines = tuple(
        Engine(int(name) if name.isdecimal() else at, None, _capacity(live, metrics), usage)
        for at, (name, metrics) in enumerate(live.metrics_by_engine.items())
    )
    server = Server(
        live.framework,
        live.framework_version,
        live.model,
        started_at=(live.started_at or "")[:19] or None,
        state="serving" if any(e.status == 200 for e in live.endpoints) else "unknown",
        config=config,
        engines=engines,
    )
    notes = [NO_LOG]
    ranks = []
    for process in _rank_processes(live):
        rank, missing = _rank(server, live, process, arch, sample)
        ranks.append(rank)
        notes += missing
    return msgspec.structs.replace(server, ranks=tuple(ranks), notes=tuple(dict.fromkeys(notes)))


def _rank_processes(live: LiveServer) -> list[Process]:
    alive = [p for p in live.processes if not p.zombie]
    workers = [p for p in alive if p.role in WORKERS] or [p for p in alive if p.role == "engine"]
    return sorted(workers, key=lambda p: (p.dp or 0, p.pp or 0, p.tp or 0, p.pid))


def _config(live: LiveServer) -> dict[str, Any]:
    """What was asked for, by the contract's names: the server's own answer, else its command line."""
    root = live.processes[0].arguments if live.processes else ()
    flags = titles.flags(root)
    info = _body(live, "/server_info", "/get_server_info")
    if live.framework == "sglang":
        from memledger.frameworks.sglang_config import ConfigBuilder

        builder = ConfigBuilder()
        builder.command(" ".join(f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in flags.items()))
        if isinstance(info, dict):
            builder.arguments = {k: v for k, v in info.items() if k != "internal_states"}
        values = builder.values()
    else:
        from memledger.frameworks.vllm_config import ConfigFacts

        facts = ConfigFacts()
        facts.command = {_VLLM_NAMES.get(k, k): v for k, v in flags.items()}
        values = facts.names(None)
    config = {k: v for k, v in values.items() if v is not None}
    labels = live.metrics.labels if live.metrics is not None else {}
    fraction = as_float(labels.get("gpu_memory_utilization"))
    if "memory_fraction" not in config and fraction is not None:
        config["memory_fraction"] = fraction
    for name, seen in (("tp_size", "tp"), ("pp_size", "pp"), ("dp_size", "dp")):
        ranks = [getattr(p, seen) for p in live.processes if getattr(p, seen) is not None]
        # Without the flag the engine runs as many as are seen.
        config.setdefault(name, max(ranks, default=0) + 1)
    if live.port is not None:
        config.setdefault("port", live.port)
    return config


_VLLM_NAMES: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def _body(live: LiveServer, *paths: str) -> Any:
    return next((e.body for e in live.endpoints if e.path.partition("?")[0] in paths and e.body is not None), None)


def _capacity(live: LiveServer, metrics: Metrics | None) -> Capacity:
    if metrics is None:
        return Capacity()
    info = _body(live, "/server_info", "/get_server_info")
    states = info.get("internal_states") if isinstance(info, dict) else None
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    requests = as_float(metrics.labels.get("kv_cache_max_concurrency"))
    return Capacity(
        kv_tokens=metrics.kv_tokens,
        kv_blocks=metrics.kv_blocks if metrics.kv_block_tokens != 1 else None,
        kv_block_tokens=metrics.kv_block_tokens if metrics.kv_block_tokens != 1 else None,
        state_slots=metrics.state_slots,
        max_running_requests=as_int(state.get("effective_max_running_requests_per_dp")),
        concurrency=Concurrency(requests=requests),
    )


def _rank(
    server: Server, live: LiveServer, process: Process, arch: Architecture | None, sample: Sample
) -> tuple[Rank, list[str]]:
    engine = live.metrics_by_engine.get(str(process.dp or 0)) or live.metrics
    devices = sample.devices.devices if sample.devices is not None else ()
    rank = Rank(
        dp=process.dp,
        pp=process.pp,
        tp=process.tp if process.tp is not None else 0,
        ep=process.ep,
        pid=process.pid,
        gpu=Gpu(kind=devices[0].kind if devices else None),
        capacity=_capacity(live, engine),
    )
    entries, missing = (_sglang(live, process), []) if live.framework == "sglang" else ([], [])
    have = {e.account.partition("/")[0] for e in entries}
    for account, make in (("weights", _weights), ("kv_cache", _pool), ("recurrent_state", _state)):
        if account in have:
            continue
        try:
            found = make(server, rank, arch, engine)
        except NotModelledError as error:
            missing.append(f"{account.replace('_', ' ')} not known: {error}")
            continue
        if found is not None:
            entries.append(found)
    if "cuda_graphs" not in have:
        missing.append("CUDA graphs are not known without the log")
    reason = "not known without the log: " + ", ".join(_absent(entries, arch, engine))
    residual = Residual(None, None, None, "open", None, reason)
    return msgspec.structs.replace(rank, entries=tuple(entries), residual=residual), missing


def _absent(entries: list[Entry], arch: Architecture | None, engine: Metrics | None) -> list[str]:
    """What a complete ledger would have beside the entries; names as vLLM's open ledgers use them."""
    have = {e.account.partition("/")[0] for e in entries}
    hybrid = (arch is not None and arch.state_layers) or (engine is not None and engine.state_slots)
    wanted = [("weights", "the weights"), ("kv_cache", "the KV cache"), ("cuda_graphs", "the CUDA graphs")]
    wanted += [("recurrent_state", "the recurrent state")] if hybrid else []
    return [words for account, words in wanted if account not in have] + ["memory outside torch"]


def _sglang(live: LiveServer, process: Process) -> list[Entry]:
    """What a scheduler itself measured at its start (`memory_usage` in /server_info, 0.5.x): GiB, without the recurrent state."""
    info = _body(live, "/server_info", "/get_server_info")
    states = info.get("internal_states") if isinstance(info, Mapping) else None
    at = process.dp or 0
    state = states[at] if isinstance(states, list) and at < len(states) and isinstance(states[at], Mapping) else {}
    told = state.get("memory_usage")
    if not isinstance(told, Mapping):
        return []
    rows = []
    for name, account in (("weight", "weights/model"), ("kvcache", "kv_cache/pool")):
        size = as_float(told.get(name))
        if size is not None and size >= 0:
            rows.append(_measured(account, size, "/server_info"))
    graphs = told.get("graph")
    sizes = list(graphs.values()) if isinstance(graphs, Mapping) else [graphs]
    known = [size for value in sizes if (size := as_float(value)) is not None]
    if known:
        rows.append(_measured("cuda_graphs/total", sum(known), "/server_info"))
    return rows


def _measured(account: str, gib: float, where: str) -> Entry:
    return entry(account, Amount(round(gib * GIB), _GB_DIGITS), "live", note=f"as the server says ({where})")


def _weights(server: Server, rank: Rank, arch: Architecture | None, _: Metrics | None) -> Entry | None:
    from memledger.model.check import expected_weights

    known = _known(arch)
    each = expected_weights(server, known, rank, Entry("weights/model", 0, 0, "modelled"))
    return _modelled("weights/model", each.low, each.high, "by the architecture")


def _pool(server: Server, rank: Rank, arch: Architecture | None, metrics: Metrics | None) -> Entry | None:
    given = as_int((metrics.labels if metrics is not None else {}).get("kv_cache_memory_bytes"))
    if given is not None and given > 0:
        return entry("kv_cache/pool", Amount(given), "live", note="as asked for (--kv-cache-memory-bytes)")
    if rank.capacity.kv_tokens is None and rank.capacity.kv_blocks is None:
        raise NotModelledError("the server does not tell its tokens or blocks")
    from memledger.model import check_vllm

    known = _known(arch)
    if server.framework != "vllm":
        raise NotModelledError("the server does not tell the pool's size")
    _, low, high, _ = check_vllm.expected_dense(server, known, rank)
    return _modelled("kv_cache/pool", low, high, "tokens x bytes of a token")


def _state(server: Server, rank: Rank, arch: Architecture | None, metrics: Metrics | None) -> Entry | None:
    """SGLang's state pool, which its answers leave out: (slots + 1) x bytes of a slot."""
    if server.framework != "sglang" or metrics is None or not metrics.state_slots:
        return None
    from memledger.model.check import parallel_of
    from memledger.model.state import default_dtypes, slot_bytes

    known = _known(arch)
    conv, ssm = default_dtypes(known, "sglang", server.framework_version)
    asked = server.config.get("state_dtype")
    if isinstance(asked, str) and asked != "auto":
        ssm = asked.removeprefix("torch.")
    each = slot_bytes(known, parallel_of(server), conv, ssm, "sglang", stage=rank.pp)
    rows = metrics.state_slots + 1
    return entry(
        "recurrent_state/ssm" if each.temporal else "recurrent_state/conv",
        Amount(rows * each.total),
        "modelled",
        note=f"{rows} rows x {each.total:,} bytes, {ssm}",
        rows=rows,
    )


def _known(arch: Architecture | None) -> Architecture:
    if arch is None:
        raise NotModelledError("the model's architecture is not known (--model-config FILE gives it)")
    return arch


def _modelled(account: str, low: int, high: int, note: str) -> Entry:
    middle = (low + high) // 2
    return entry(account, Amount(middle, (high - low + 1) // 2), "modelled", note=note)
