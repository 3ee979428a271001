"""What the tests of findings share: servers of either engine from entries in GiB."""

from sample_reports import at, gib

from memledger import findings
from memledger.ledger import Budget, Capacity, Concurrency, Gpu, Rank, Server, Usage, close, entry


def found(server, code):
    return next((f for f in findings.find(server) if f.code == code), None)


def worker(opening, *, tp=0, base="device", budget=None, capacity=None, gpu=None, details=None, **sizes):
    """One rank: `weights_model=10.0` is the account `weights/model`; details by account."""
    names = {name: name.replace("__", "/") for name in sizes}
    entries = tuple(
        entry(names[name], gib(size), "logged", evidence=at(10 + i), **(details or {}).get(names[name], {}))
        for i, (name, size) in enumerate(sizes.items())
    )
    total = gib(opening) if opening is not None else None
    residual = close(base if total is not None else None, total, entries)
    return Rank(
        tp=tp,
        entries=entries,
        residual=residual,
        budget=budget or Budget(),
        capacity=capacity or Capacity(),
        gpu=gpu or Gpu(kind="cuda"),
    )


def vllm(*ranks, version="0.25.1", usage=None, failures=(), state="serving", **config):
    return Server("vllm", version, ranks=ranks, config=config, usage=usage or Usage(), failures=failures, state=state)


def sglang(*ranks, version="0.5.18", usage=None, failures=(), state="serving", **config):
    return Server("sglang", version, ranks=ranks, config=config, usage=usage or Usage(), failures=failures, state=state)


def serving(running, queued=0, kv=None, **more):
    return Usage(peak_running_requests=running, peak_queued_requests=queued, peak_kv_usage=kv, seen=True, **more)


def concurrency(tokens, length, requests, **more):
    return Capacity(kv_tokens=tokens, concurrency=Concurrency(length, requests), **more)
