"""The arithmetic of an advice: by how much a setting has to move, what it costs, and the exact flag.

Which way it moves is decided with the cause (`memledger.postmortem.causes`); here the figures of the failure and of the
start are put in. Where a figure is missing the advice stays as it is.
"""

from __future__ import annotations

import math
from typing import Final

from memledger import words as n
from memledger.ledger import Effect, Rank, Remedy, Server, account_total
from memledger.postmortem.causes import FLAGS, Cause
from memledger.postmortem.incident import Advice, Kind, Numbers, ServerState
from memledger.postmortem.symptom import Symptom
from memledger.units import GIB, MIB

_AFTER_THE_POOLS: Final[frozenset[Kind]] = frozenset(
    {"graph_capture", "warmup", "prefill", "decode", "workspace", "communication", "library"}
)
"""What finds too little because the pools were sized before: a smaller fraction leaves it more."""
_AT_RUN_TIME: Final[frozenset[Kind]] = frozenset({"prefill", "decode"})
_BEYOND: Final = 2 * GIB
"""Over its budget by less a process comes through its context and graphs."""
_COMPILERS: Final = frozenset({"cicc", "nvcc", "ptxas", "cc1plus", "cudafe++", "ninja", "cl", "clang", "clang++", "ld"})
_SAYS_IT_ITSELF: Final = frozenset({"state_blocks_too_few", "workspace_overflow"})
"""Rules whose line names the figure: then no general advice of the same direction is repeated."""
_STEP: Final = 0.01
_MARGIN: Final = 64 * MIB
"""What is added to the memory that was missing, or a quarter of it: the request that failed is seldom the last one."""
_MOST_FRACTION: Final = 0.97
_LEAST_CHUNK: Final = 256
_ROOM: Final = 0.9
"""A chunk is offered whose transient takes no more than this share of what was free."""


def figured(
    cause: Cause, root: Symptom, numbers: Numbers, server: Server | None, state: ServerState | None
) -> tuple[Advice, ...]:
    """The advice of a cause with its arithmetic."""
    rank = _rank(server, root)
    found: list[Advice] = []
    for advice in cause.advice:
        better: Advice | None = None
        if cause.kind in _AFTER_THE_POOLS and advice.direction == "lower" and advice.setting == "fraction":
            better = _lower_fraction(cause.kind, numbers, server, rank)
        elif root.rule.endswith(".weights_leave_no_kv") and advice.setting == "fraction":
            better = _above(root, server)
        elif advice.setting == "fraction" and advice.direction == "raise" and cause.kind == "kv_pool":
            better = _raise_fraction(root, server, rank)
        elif advice.setting == "chunk" and cause.kind == "prefill":
            better = _smaller_chunk(numbers, server, state)
        found.append(better or advice)
    printed = _printed(root, server)
    if root.rule.rpartition(".")[2] in _SAYS_IT_ITSELF and printed:
        found = [advice for advice in found if advice.direction != printed[0].direction]
    return (*printed, *found)


def _rank(server: Server | None, root: Symptom) -> Rank | None:
    if server is None or not server.ranks:
        return None
    named = {name: value for name, value in root.prefix.ranks.items() if name in {"dp", "pp", "tp", "ep"}}
    for rank in server.ranks:
        if named and all(getattr(rank, name) == value for name, value in named.items()):
            return rank
    return server.ranks[0]


def _fraction(server: Server | None) -> float | None:
    value = server.config.get("memory_fraction") if server is not None else None
    return float(value) if isinstance(value, (int, float)) and 0 < value <= 1 else None


def _base(numbers: Numbers, rank: Rank | None) -> int | None:
    """What the fraction is a fraction of: the device; SGLang takes what was free at its start, which is less."""
    total = numbers.total_bytes
    if total is None and rank is not None:
        total = rank.gpu.total_bytes
    opening = rank.residual.opening_bytes if rank is not None else None
    return min((size for size in (total, opening) if size), default=None)


def _steps(size: int, base: int) -> float:
    """The least number of hundredths of `base` that are `size` or more."""
    return max(1, math.ceil(size / base / _STEP)) * _STEP


def _lower_fraction(kind: Kind, numbers: Numbers, server: Server | None, rank: Rank | None) -> Advice | None:
    asked, free, base = numbers.requested_bytes, numbers.free_bytes, _base(numbers, rank)
    if asked is None or free is None or base is None:
        return None
    missing = max(0, asked - free)
    step = _steps(missing + max(missing // 4, _MARGIN), base)
    flag = FLAGS[server.framework]["fraction"] if server is not None else None
    old = _fraction(server)
    if missing >= base // 2 or (old is not None and old - step < 0.05):
        # No fraction leaves so much: the request itself is at fault.
        return None
    short = f"{n.amount(missing)} were missing" if missing else "next to nothing was missing"
    gained = int(step * base)
    if flag is None or old is None:
        named = f" ({flag})" if flag is not None else ""
        text = (
            f"Lower the memory fraction{named} by {step:.2f} at least: {short}, and {step:.2f} of {n.gib_about(base)} "
            f"is {n.gib_about(gained)}. That leaves a margin for what follows it."
        )
        return Advice("lower", text, setting="fraction")
    new = round(old - step, 2) if round(old, 2) == old else math.floor((old - step) * 100) / 100
    lost = _tokens(rank, int((old - new) * base))
    cost = f" It costs about {n.count_short(lost)} KV tokens." if lost is not None else ""
    text = (
        f"Lower {flag} from {old:g} to {new:g} at most: {short}, and {old - new:.2f} of {n.gib_about(base)} is "
        f"{n.gib_about(int((old - new) * base))}. That leaves a margin for what follows it.{cost}"
    )
    effects: tuple[Effect, ...] = (Effect(account="free", bytes=int((old - new) * base)),)
    if lost is not None:
        effects = (*effects, Effect(capacity="kv_tokens", change=-lost))
    if kind in _AT_RUN_TIME:
        text += _over_budget(numbers, server, old)
    return Advice(
        "lower", text, Remedy((flag, f"{new:g}"), effects, "arithmetic on the failing line"), setting="fraction"
    )


def _over_budget(numbers: Numbers, server: Server | None, fraction: float) -> str:
    """That a process holds far more than its budget (vLLM): then a step for this request alone will not do."""
    total, process = numbers.total_bytes, numbers.process_bytes
    if server is None or server.framework != "vllm" or total is None or process is None:
        return ""
    beyond = process - int(fraction * total)
    if beyond < _BEYOND:
        return ""
    return (
        f" But the process holds {n.gib_about(process)}, {n.gib_about(beyond)} over its budget of {fraction:g} x {n.gib_about(total)}: "
        "activations beyond the profile, graphs or libraries have grown, and may go on."
    )


def _tokens(rank: Rank | None, size: int) -> int | None:
    """KV tokens that `size` bytes of the rank's pool hold; None where recurrent state lies in the same pool."""
    if rank is None or not rank.capacity.kv_tokens:
        return None
    if any(e.account.startswith("recurrent_state") or e.detail.get("includes_recurrent_state") for e in rank.entries):
        return None
    pool = account_total(rank.entries, "kv_cache")
    if pool is None or pool.bytes <= 0:
        return None
    return min(int(size / pool.bytes * rank.capacity.kv_tokens), rank.capacity.kv_tokens)


def _raise_fraction(root: Symptom, server: Server | None, rank: Rank | None) -> Advice | None:
    """The fraction that gives the pool what one request needs (vLLM prints both sizes)."""
    needed, have = root.amounts.get("needed_bytes"), root.amounts.get("available_bytes")
    base, old = _base(Numbers(), rank), _fraction(server)
    if needed is None or have is None or base is None or server is None or needed.bytes <= have.bytes:
        return None
    step = _steps(needed.bytes - have.bytes, base)
    flag = FLAGS[server.framework]["fraction"]
    short = f"one request needs {n.gib_about(needed.bytes)} of KV cache, and {n.gib_about(have.bytes)} are there"
    if old is None:
        text = f"Raise {flag} by {step:.2f}, where the device has room: {short}."
        return Advice("raise", text, setting="fraction")
    new = round(old + step, 2)
    if new > _MOST_FRACTION:
        text = f"Raising {flag} is not enough: {short}, and {old:g} plus {step:.2f} would leave the device nothing."
        return Advice("none", text, setting="fraction")
    text = f"Raise {flag} from {old:g} to {new:g}, where the device has room: {short}."
    return Advice("raise", text, Remedy((flag, f"{new:g}"), (), "arithmetic on the failing line"), setting="fraction")


def _above(root: Symptom, server: Server | None) -> Advice | None:
    """The fraction that the weights leave a rest of, as SGLang prints it; from 1 on there is none."""
    least = root.counts.get("raise_above", root.counts.get("minimum_viable"))
    if least is None:
        return None
    flag = FLAGS[server.framework if server is not None else "sglang"]["fraction"]
    if least > _MOST_FRACTION:
        text = f"No {flag} is enough: it would have to be above {least:g}. The weights fill the GPU: more GPUs, a quantised copy or offloading."
        return Advice("none", text, setting="fraction")
    new = math.floor(least * 100 + 1) / 100
    text = f"Raise {flag} to {new:g} or more, where the device has room: only what is above {least:g} is left for the KV cache."
    return Advice("raise", text, Remedy((flag, f"{new:g}"), (), "printed by SGLang"), setting="fraction")


def _smaller_chunk(numbers: Numbers, server: Server | None, state: ServerState | None) -> Advice | None:
    """The chunk whose transient would have fitted, were it to grow with the tokens of the step."""
    asked, free = numbers.requested_bytes, numbers.free_bytes
    chunk = server.config.get("chunked_prefill_tokens") if server is not None else None
    if server is None or asked is None or free is None or not isinstance(chunk, int) or chunk < 2 * _LEAST_CHUNK:
        return None
    tokens = (state.scheduled_tokens or state.new_tokens) if state is not None else None
    step = tokens if tokens is not None and 0 < tokens <= chunk else None
    flag, new = FLAGS[server.framework]["chunk"], chunk // 2
    while new >= _LEAST_CHUNK and asked * new / (step or chunk) > _ROOM * free:
        new //= 2
    if new < _LEAST_CHUNK:
        return None
    # Of a step whose tokens are known, what one token takes is known as well; else a whole chunk is supposed.
    if step is not None:
        each = f"{n.amount(asked)} for a step of {n.count(step)} tokens is {n.amount(asked // step)} a token"
    else:
        each = f"{n.amount(asked)} for a chunk of {n.count(chunk)} tokens, if the batch was a whole one, is {n.amount(asked // chunk)} a token"
    would = int(asked * new / (step or chunk))
    text = f"Lower {flag} from {chunk} to {new}: {each}; {n.count(new)} tokens would ask for {n.amount(would)}, if it grows with the tokens."
    return Advice("lower", text, Remedy((flag, str(new)), (), "arithmetic on the failing line"), setting="chunk")


# ------------------------------------------------------------------------------------------- what the line itself names


def _printed(root: Symptom, server: Server | None) -> tuple[Advice, ...]:
    """Advice whose figure stands in the failing line."""
    rule, counts = root.rule.rpartition(".")[2], root.counts
    found: list[Advice] = []
    blocks, fits, length = (
        counts.get("state_blocks"),
        counts.get("estimated_max_model_len"),
        counts.get("max_model_len"),
    )
    if rule == "state_blocks_too_few" and blocks:
        remedy = Remedy(("--max-num-seqs", str(int(blocks))), (), "printed by vLLM")
        found.append(
            Advice("lower", f"Lower --max-num-seqs to {int(blocks)}: each request holds one block of state.", remedy)
        )
    if rule == "kv_too_small" and fits:
        less = Effect(capacity="context_length", change=int(fits - length)) if length else None
        remedy = Remedy(("--max-model-len", str(int(fits))), (less,) if less else (), "printed by vLLM")
        found.append(Advice("lower", f"Lower --max-model-len to {int(fits)}: that fits what is there.", remedy))
    if rule == "workspace_overflow" and (size := root.amounts.get("requested_bytes")) is not None:
        found.append(_workspace(size.bytes, server))
    if root.kind in {"kernel_oom", "cgroup_oom"} and (root.words.get("name") or "").strip() in _COMPILERS:
        text = (
            f"Start with MAX_JOBS=1 in the environment once, until the kernels are cached: {root.words['name'].strip()} is a compiler, "
            "and the engine runs several at a time."
        )
        found.append(Advice("change", text, Remedy(("MAX_JOBS=1",), (), "the killed process")))
    if root.kind == "shm_full":
        needed, free = root.amounts.get("requested_bytes"), root.amounts.get("free_bytes")
        if needed is not None and free is not None:
            found.append(
                Advice(
                    "raise",
                    f"Raise it by {n.amount(max(0, needed.bytes - free.bytes))} at least: {n.amount(needed.bytes)} were needed, {n.amount(free.bytes)} were free.",
                )
            )
    return tuple(found)


_WORKSPACE_NAMES: Final = {
    "sglang": "SGLANG_FLASHINFER_WORKSPACE_SIZE",
    "vllm": "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
}
"""Environment variables in bytes (SGLang 0.5.23, vLLM 0.33)."""


def _workspace(size: int, server: Server | None) -> Advice:
    # The line names one of the buffers in the workspace: twice that leaves room for the others.
    wanted = max(512 * MIB, 1 << (2 * size - 1).bit_length())
    names = [_WORKSPACE_NAMES[server.framework]] if server is not None else list(_WORKSPACE_NAMES.values())
    text = f"Raise the workspace: one buffer of {n.amount(size)} must fit; {' or '.join(f'{name}={wanted}' for name in names)} ({n.amount(wanted)})."
    remedy = Remedy((f"{names[0]}={wanted}",), (), "the size that the line names") if len(names) == 1 else None
    return Advice("raise", text, remedy)
