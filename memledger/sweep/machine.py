"""The machine beside a server that runs on it: its ledger, its devices' memory, the memory of its processes."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from memledger.ledger import Report, Server
from memledger.live.sample import LiveServer, Sample
from memledger.sweep.values import Memory


class Found(msgspec.Struct, frozen=True):
    """What is known of the server from its log and the machine; `reason` says what is not."""

    pid: int
    gpus: int = 0
    gpu_name: str | None = None
    pool_bytes: int | None = None
    bytes_per_token: float | None = None
    state_bytes_per_request: int | None = None
    reason: str | None = None


class MachineError(Exception):
    """There is no such server on this machine; one sentence."""


def pid_of_port(port: int) -> int | None:
    """The server of this machine that answers on a port; None where none is seen."""
    from memledger.live import attach

    return next((one.pid for one in attach.find_servers(ask=False) if one.port == port), None)


class Machine:
    """Looks at one server of this machine again and again; close it."""

    def __init__(self, pid: int, api_key: str | None = None) -> None:
        from memledger.live import gather
        from memledger.live.attach import AttachError

        self._pid = pid
        self._watch = gather.Watch(pid, api_key, ask=False)
        self._report: Report | None = None
        self._own = self._built = False
        try:
            self._first = self._watch.sample()
        except AttachError as error:
            self._watch.close()
            raise MachineError(str(error)) from error

    def close(self) -> None:
        """Let go of the driver."""
        self._watch.close()

    def read(self) -> Found:
        """The ledger of the server from its log, else from the server itself; takes as long as the log is long."""
        sample = self._first
        server = sample.servers[0]
        reason = None
        report = None
        if server.log.path is not None:
            report, reason = _from_log(server.log.path)
            self._own = report is not None
        if report is None:
            from memledger.live import rebuild

            report, self._built = rebuild.report(server, sample, model_config=None, why=reason or ""), True
        self._report = report
        return msgspec.structs.replace(_figures(report, sample), pid=server.pid, reason=reason)

    def memory(self, *, accounts: bool) -> Memory | None:
        """Memory now; None once the server is gone. `accounts`: with the ledger's rows (costs more)."""
        from memledger.live.attach import AttachError

        try:
            sample = self._watch.sample()
        except AttachError:
            return None
        found = memory_of(sample, self._accounts(sample) if accounts else {})
        # The watch looks at the processes anew only now and then.
        return msgspec.structs.replace(found, host_bytes=_resident(sample.servers[0]))

    def _accounts(self, sample: Sample) -> dict[str, int]:
        from memledger.reconcile import reconcile

        if self._report is None:
            return {}
        lined_up = reconcile(self._report, sample, pid=self._pid, own_log=self._own, built=self._built)
        live = lined_up.live
        if live is None or live.server is None:
            return {}
        sums: Counter[str] = Counter()
        for rank in lined_up.servers[live.server].ranks:
            for entry in rank.entries:
                sums[entry.account] += entry.bytes
        return dict(sums)


def memory_of(sample: Sample, accounts: dict[str, int]) -> Memory:
    """The sample's figures of its one server."""
    server = sample.servers[0]
    pids = {p.pid for p in server.processes}
    devices = sample.devices.devices if sample.devices is not None else ()
    own = [d for d in devices if any(p.pid in pids for p in d.processes or ())] if sample.host_pids else []
    if not own:
        placed = {index for p in server.processes for index in p.gpu_indices or ()}
        own = [d for d in devices if d.index in placed and d.parent_uuid is None]
    used = [p.used_bytes for d in own for p in d.processes or () if p.pid in pids]
    smallest = min((d for d in own if d.free_bytes is not None), key=lambda d: d.free_bytes or 0, default=None)
    resident = [p.resident_bytes for p in server.processes if not p.zombie]
    return Memory(
        accounts,
        sum(v for v in used if v is not None) if used and None not in used else None,
        smallest.free_bytes if smallest is not None else None,
        smallest.total_bytes if smallest is not None else None,
        sum(v for v in resident if v is not None) if resident and None not in resident else None,
        _host_available(sample),
        len(own),
    )


def _resident(server: LiveServer) -> int | None:
    """Resident memory of the server's processes now, bytes; pages that they share count in each. None where one can't be read."""
    import psutil

    total = 0
    for process in server.processes:
        if not process.zombie:
            try:
                total += psutil.Process(process.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            except psutil.Error:
                return None
    return total or None


def _host_available(sample: Sample) -> int | None:
    """What the host can still give, or the container where its limit is nearer."""
    memory = sample.memory
    known = [memory.available_bytes] if memory.available_bytes is not None else []
    if memory.cgroup_limit_bytes is not None and memory.cgroup_used_bytes is not None:
        known.append(max(0, memory.cgroup_limit_bytes - memory.cgroup_used_bytes))
    return min(known, default=None)


def _from_log(path: str) -> tuple[Report | None, str | None]:
    """The log's report with the model's figures, or why not."""
    from memledger import pipeline
    from memledger.conclude import complete
    from memledger.grammar import load_rules

    got = pipeline.read([path], load_rules(), cores=None)
    if got.problems:
        return None, got.problems[0]
    if not any(rank.entries for server in got.report.servers for rank in server.ranks):
        return None, "its log holds nothing of a start"
    return complete(got.report, None, None, look_here=True), None


_UNKNOWN: Final = Found(0)


def _figures(report: Report, sample: Sample) -> Found:
    """The pool and the model's arithmetic of the last start."""
    memory = memory_of(sample, {})
    server: Server | None = report.servers[-1] if report.servers else None
    gpus = memory.gpus or (sum(r.gpu.kind != "cpu" for r in server.ranks) if server is not None else 0)
    if server is None or not server.ranks:
        return msgspec.structs.replace(_UNKNOWN, gpus=gpus)
    from memledger.compare import meaning, side

    rank = side.choose_rank(server, server.ranks)
    if rank is None:
        return msgspec.structs.replace(_UNKNOWN, gpus=gpus)
    one = side.side_of(server, rank)
    model = meaning.model_bytes_per_token(one)
    return msgspec.structs.replace(
        _UNKNOWN,
        gpus=gpus,
        gpu_name=rank.gpu.name,
        pool_bytes=one.pool.amount.bytes if one.pool.amount is not None else None,
        bytes_per_token=float(model) if model is not None else None,
        state_bytes_per_request=meaning.state_bytes_per_request(one),
    )
