"""What ran out, and what to do: the kind of an incident with its confidence, by mechanism.

A confidence above `MOST_WITHOUT_PROOF` is given only where a line of the input states the cause. Everything else is arithmetic on
the figures of the message, and names its candidates.
"""

from __future__ import annotations

from typing import Final

import msgspec

from memledger.ledger import Remedy, Server
from memledger.postmortem.incident import Advice, Candidate, Kind, Numbers, Phase
from memledger.postmortem.pieces import Pieces
from memledger.postmortem.symptom import Frame, Symptom
from memledger.units import GIB, MIB

CONTEXT_BYTES: Final = 1 * GIB
"""What a process holds outside torch without being asked: CUDA context, loaded kernels, cuBLAS (about 0.3 to 1 GiB)."""
COMMUNICATION_BYTES: Final = 6 * GIB
"""More outside torch than contexts and libraries take: buffers of NCCL, NVSHMEM or DeepEP, or a driver's pool."""
STATIC_REST_BYTES: Final = 64 * MIB
"""Tensors that are made once leave next to nothing reserved and unallocated; activations leave more."""
FRAGMENTED_SHARE: Final = 0.05
"""Of the device: less than this reserved and unallocated is what every run of activations leaves."""

WHO: Final = (
    "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv (on the host: a container shows its own only)"
)
KERNEL_LOG: Final = "dmesg -T | grep -i -E 'killed process|oom'"
_STARTING: Final = frozenset(
    {
        "run_scheduler_process",
        "init_model_worker",
        "init_tp_model_worker",
        "init_worker",
        "init_device",
        "_init_executor",
    }
)
"""Functions that both engines pass while they start; SGLang's scheduler passes the first while it serves as well, below its loop."""
_SERVING: Final = frozenset({"serving", "prefill", "decode"})


class Cause(msgspec.Struct, frozen=True):
    """A conclusion: `basis` says what it stands on."""

    kind: Kind
    confidence: float
    text: str
    basis: str
    candidates: tuple[Candidate, ...] = ()
    advice: tuple[Advice, ...] = ()
    device_memory: bool | None = True


def judge(
    symptom: Symptom,
    numbers: Numbers,
    phase: Phase,
    frames: tuple[Frame, ...],
    server: Server | None,
    pieces: Pieces | None = None,
) -> Cause:
    """The cause of one failure. `pieces`: what a memory snapshot of it says."""
    for rule in (_silent_end, _not_memory, _host, _of_the_engine, _named_library, _startup_check):
        found = rule(symptom, numbers, server)
        if found is not None:
            return _with_flags(found, server)
    return _with_flags(_device(symptom, numbers, phase, frames, server, pieces), server)


FLAGS: Final[dict[str, dict[str, str]]] = {
    "vllm": {
        "fraction": "--gpu-memory-utilization",
        "chunk": "--max-num-batched-tokens",
        "requests": "--max-num-seqs",
        "length": "--max-model-len",
        "capture": "--max-cudagraph-capture-size",
        "eager": "--enforce-eager",
        "slots": "--max-num-seqs",
    },
    "sglang": {
        "fraction": "--mem-fraction-static",
        "chunk": "--chunked-prefill-size",
        "requests": "--max-running-requests",
        "length": "--context-length",
        "capture": "--cuda-graph-max-bs",
        "eager": "--disable-cuda-graph",
        "slots": "--max-mamba-cache-size, --max-running-requests",
    },
}
"""What each engine calls a setting; where the engine is not known, both are named."""


def _with_flags(cause: Cause, server: Server | None) -> Cause:
    """The advice in the words of the engine."""
    engines = [FLAGS[server.framework]] if server is not None else list(FLAGS.values())
    filled = []
    for advice in cause.advice:
        text = advice.text
        named = [name for name in engines[0] if "{" + name + "}" in text]
        for name in named:
            text = text.replace("{" + name + "}", " or ".join(dict.fromkeys(engine[name] for engine in engines)))
        filled.append(msgspec.structs.replace(advice, text=text, setting=named[0] if len(named) == 1 else None))
    return msgspec.structs.replace(cause, advice=tuple(filled))


# --------------------------------------------------------------------------------------------------------------------
# What the line itself states.

_NEGATIVES: Final = {
    "on_chip_memory": "a kernel asked for more shared memory or registers than the chip has (a tile or block size), which is no device memory",
    "size_bug": "a size in the code overflowed or is negative: the figure is no request that memory could serve",
    "illegal_access": "an illegal memory access is a fault of a kernel, not a lack of memory",
}


XIDS: Final[dict[int, str]] = {
    48: "an uncorrectable memory error (ECC)",
    64: "a row of memory that could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors",
    94: "a contained memory error (ECC)",
    95: "an uncontained memory error (ECC)",
    119: "the GPU's own processor did not answer",
    120: "an error of the GPU's own processor",
    140: "an unrecovered memory error (ECC)",
    143: "the GPU could not be set up",
    158: "a fatal timeout of the GPU",
    167: "a fatal timeout of the PCIe bus",
    171: "an uncorrectable memory error (DRAM)",
    172: "an uncorrectable memory error (SRAM)",
}
"""Faults of the device that end the processes on it (NVIDIA open-gpu-kernel-modules 595.45.04, names of the Xid numbers)."""


PROGRAM_XIDS: Final[dict[int, str]] = {
    13: "an exception in a kernel",
    31: "an access to memory that is not mapped (MMU fault)",
}
"""Faults of a program on the device (same source): often the second error after one that the log names, so a cause only where it names none."""


def retried(server: Server | None) -> Cause:
    """A warning of torch's allocator on a try that failed, with nothing after it that ended a process."""
    served = server is not None and server.state in {"serving", "stopped"}
    text = (
        "Not a device out-of-memory: torch's allocator warns of every try that fails, gives back what it keeps and tries again; "
        + ("the server went on after it." if served else "no failure stands after it.")
    )
    ask = () if served else (Candidate("unknown", "A failure after the end of this input.", "the lines that follow"),)
    return Cause(
        "not_device_memory", 0.9 if served else 0.5, text, "what follows", ask, device_memory=False if served else None
    )


_EARLIER_BUFFER: Final = Candidate(
    "communication", "A buffer that could not be made before.", "the lines above the first fault"
)
"""After a buffer that could not be made (NVSHMEM, DeepEP) an illegal access is the usual second error."""


def _not_memory(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    if symptom.kind == "workspace_overflow":
        text = "A fixed workspace of the attention backend is too small for this batch; the device itself is not short."
        advice = Advice(
            "raise",
            "Raise the backend's workspace (SGLang: SGLANG_FLASHINFER_WORKSPACE_SIZE) or lower the tokens of a batch.",
        )
        return Cause("workspace", 0.9, text, "the line itself", advice=(advice,), device_memory=False)
    number = int(symptom.counts.get("xid", 0))
    if symptom.kind == "xid" and number in XIDS:
        text = f"Not a device out-of-memory: the driver reports Xid {number}, {XIDS[number]}; running out of memory leaves no such line."
        return Cause("not_device_memory", 0.9, text, "the driver's line", device_memory=False)
    if symptom.kind == "xid" and number in PROGRAM_XIDS:
        text = f"Not a device out-of-memory: the driver reports Xid {number}, {PROGRAM_XIDS[number]}; running out of memory leaves no such line."
        return Cause("not_device_memory", 0.7, text, "the driver's line", (_EARLIER_BUFFER,), device_memory=False)
    if symptom.kind == "unreliable":
        text = "Not a device out-of-memory that can be trusted: no PyTorch prints these words" + _reasons(symptom) + "."
        return Cause("unknown", 0.5, text, "the wording", device_memory=None)
    why = _NEGATIVES.get(symptom.kind)
    if why is None:
        return None
    text = f"Not a device out-of-memory: {why}."
    if symptom.kind == "illegal_access":
        return Cause("not_device_memory", 0.7, text, "the line itself", (_EARLIER_BUFFER,), device_memory=False)
    return Cause("not_device_memory", 0.9, text, "the line itself", device_memory=False)


def _reasons(symptom: Symptom) -> str:
    return f" ({'; '.join(symptom.notes)})" if symptom.notes else ""


def _silent_end(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    """A process that died without a word."""
    if symptom.role != "consequence":
        return None
    text = "A process of the server died, and no line of the input says of what."
    asked = (
        Candidate(
            "unknown",
            "An exception whose traceback is not in this input: another process, or another rank's log, has it.",
            "the first ERROR or traceback in the whole log of every process: memledger oom LOG...",
        ),
        Candidate("host_memory", "The kernel or the container's limit killed it.", KERNEL_LOG),
        Candidate(
            "not_device_memory", "The driver ended it: a fault of a kernel or of the GPU.", "dmesg -T | grep -i xid"
        ),
    )
    return Cause("unknown", 0.2, text, "what the input does not hold", asked, device_memory=None)


_HOST: Final = {
    "kernel_oom": "The machine ran out of host memory, and the kernel killed a process",
    "cgroup_oom": "A container or job reached its host memory limit, and the kernel killed a process of it",
    "oomd": "systemd-oomd killed the unit because host memory was under pressure",
    "container_killed": "The container was killed at its host memory limit (OOMKilled)",
    "evicted": "The pod was evicted because the node ran low on host memory",
    "slurm_oom": "The job step reached its host memory limit",
    "ray_memory_monitor": "Ray's memory monitor killed a worker because the node ran low on host memory",
    "shm_full": "/dev/shm is full: the shared memory of the host, not of the GPU",
    "host_alloc": "An allocation in host memory failed",
    "pinned_failed": "Pinned host memory could not be had",
    "unit_oom": "The service was killed because host memory ran out",
}


def _host(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    if symptom.kind in {"exit_code", "container_exit"}:
        code = symptom.counts.get("exit_code")
        told = f"exit code {code}" if code is not None else "exit code 137 or -9"
        text = f"The process was killed from outside ({told}); that alone does not say that memory ran out."
        asked = (
            Candidate(
                "host_memory",
                "The kernel or the container's limit killed it.",
                KERNEL_LOG,
            ),
            Candidate("unknown", "Somebody or a supervisor stopped it.", "journalctl -n 200; kubectl describe pod"),
        )
        return Cause("host_memory", 0.4, text, "the exit code", asked, device_memory=False)
    why = _HOST.get(symptom.kind)
    if why is None:
        return None
    name = symptom.words.get("name")
    size = symptom.amounts.get("anon_rss_bytes")
    whom = f": {name}" if name else ""
    held = f", which held {size.bytes / GIB:.2f} GiB" if size is not None else ""
    advice = [
        Advice(
            "raise",
            "Raise the host memory limit, or keep less on the host (offloaded weights, host KV cache, parallel compile jobs: MAX_JOBS).",
        )
    ]
    if symptom.kind == "shm_full":
        advice = [Advice("raise", "Give the container more shared memory (--shm-size 16g, or --ipc=host).")]
    return Cause(
        "host_memory", 0.9, f"{why}{whom}{held}.", "the line itself", advice=tuple(advice), device_memory=False
    )


def _of_the_engine(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    if symptom.kind not in {"engine_refusal", "engine_runtime"}:
        return None
    rule = symptom.rule.rpartition(".")[2]
    if rule == "workspace_locked_growth":
        text = "A workspace that vLLM sized and locked at its start is too small for this batch; the device itself is not short."
        same = Advice("lower", "Lower the tokens of a batch ({chunk}), or warm up with the largest one.")
        return Cause("workspace", 0.9, text, "the line itself", advice=(same,), device_memory=False)
    if rule == "gemm_workspace_failed":
        text = "A workspace of the grouped matrix multiplication, made after the pools, found too little free memory."
        return Cause("workspace", 0.9, text, "the line itself", advice=(_lower("unknown"),))
    if rule == "state_no_memory":
        text = "After the weights there is no memory left for the recurrent state: its budget comes out below one slot."
        grow = Advice("raise", "Raise the memory fraction ({fraction}) if the device has room.")
        fewer = Advice("lower", "Or lower the weights' share: more GPUs, a quantised copy, fewer drafted tokens.")
        return Cause("state_pool", 0.9, text, "the line itself", advice=(grow, fewer), device_memory=None)
    if "state" in rule or "mamba" in rule:
        slots = symptom.counts.get("state_blocks")
        held = f" ({slots} blocks of state)" if slots else ""
        text = f"The recurrent state has room for fewer requests than the engine was told to run{held}."
        advice = (
            Advice("lower", "Lower the number of running requests ({requests})."),
            Advice("raise", "Or give the pool more memory: a higher memory fraction, where the device has room."),
        )
        return Cause("state_pool", 0.9, text, "the line itself", advice=advice, device_memory=None)
    if rule == "request_slots_failed":
        text = "The table of request slots is full: the engine tried to run more requests than it has slots. No device memory is short."
        fewer_requests = (
            Advice(
                "lower",
                "Lower the number of running requests ({requests}), or update the engine: its own limit should prevent it.",
            ),
        )
        return Cause("kv_pool", 0.9, text, "the line itself", advice=fewer_requests, device_memory=False)
    if symptom.kind == "engine_runtime":
        text = "The KV pool ran out of tokens while serving: a pool of the engine was full, not the device."
        full: tuple[Advice, ...] = (
            Advice("lower", "Lower the running requests or the tokens of a prefill batch."),
            Advice("raise", "Or raise the pool: a higher memory fraction, a smaller KV type, more GPUs."),
        )
        return Cause("kv_pool", 0.9, text, "the line itself", advice=full, device_memory=False)
    text = (
        "The engine refused to start: after weights and activations its budget leaves no room for the KV pool it needs."
    )
    ways = (
        Advice(
            "raise",
            "Raise the memory fraction ({fraction}) if the device has room.",
        ),
        Advice("lower", "Or lower what the pool must hold ({length}, {chunk}), or use more GPUs."),
    )
    return Cause("kv_pool", 0.9, text, "the line itself", advice=ways, device_memory=None)


def _named_library(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    if symptom.kind == "library":
        text = (
            "A CUDA library (cuBLAS, cuDNN or NCCL) could not get memory outside torch: the pools left it too little."
        )
        advice = (
            Advice("lower", "Lower the memory fraction ({fraction}), so that libraries find memory outside the pools."),
        )
        return Cause("library", 0.9, text, "the line itself", advice=advice)
    if symptom.kind == "communication":
        text = "NVSHMEM or DeepEP could not map its communication buffers: the pools left too little device memory."
        advice = (
            Advice(
                "lower",
                "Lower the memory fraction ({fraction}), or the buffers (DeepEP's tokens per rank, NVSHMEM heap).",
            ),
        )
        return Cause("communication", 0.9, text, "the line itself", advice=advice)
    return None


def _startup_check(symptom: Symptom, numbers: Numbers, server: Server | None) -> Cause | None:
    if symptom.kind != "startup_check":
        return None
    if symptom.rule.endswith("free_memory_changed"):
        text = (
            "Free memory changed while the engine measured it: another process on the GPU gave memory back or took it."
        )
        advice = (Advice("free", "Start one server at a time on a GPU, and only when the other is up or gone."),)
        return Cause("other_process", 0.7, text, "the line itself", (_who(),), advice)
    total, free = numbers.total_bytes, numbers.free_bytes
    if total is None or free is None:
        text = "The engine found less free memory at its start than its fraction asks for."
        return Cause("other_process", 0.5, text, "the line itself", (_who(),))
    held = total - free
    desired = numbers.more.get("desired_bytes")
    short = f"; {(desired - free) / GIB:.2f} GiB are missing" if isinstance(desired, int) and desired > free else ""
    text = f"{held / GIB:.2f} GiB of the GPU were in use before this server loaded anything{short}."
    small = held < 0.02 * total + CONTEXT_BYTES // 2
    lower = Advice(
        "lower", f"Or lower the fraction to at most {max(0.0, free / total - 0.005):.2f}, which fits what is free."
    )
    free_it = Advice(
        "free",
        "End what holds the memory: often workers of the previous start (look for VLLM:: and sglang:: processes).",
    )
    if server is not None and any(rank.gpu.unified_memory for rank in server.ranks):
        text += " On unified memory the page cache counts as in use."
        cached = Candidate(
            "other_process", "The page cache of the machine.", "free -h; sync; echo 3 > /proc/sys/vm/drop_caches"
        )
        return Cause("other_process", 0.5, text, "arithmetic on the line", (cached, _who()), (free_it, lower))
    if small:
        text += " That is little more than a context and the driver: the fraction asks for nearly the whole device."
        return Cause("other_process", 0.5, text, "arithmetic on the line", (_who(),), (lower,))
    # A fraction below a third is no way to run a server: then only the memory itself helps.
    ways = (free_it, lower) if free > total // 3 else (free_it,)
    return Cause("other_process", 0.7, text, "arithmetic on the line", (_who(),), ways)


def _who() -> Candidate:
    return Candidate("other_process", "A process of another server, of a previous start, or a desktop.", WHO)


# --------------------------------------------------------------------------------------------------------------------
# A failed allocation on the device: by its figures and its phase.


def _device(
    symptom: Symptom,
    numbers: Numbers,
    phase: Phase,
    frames: tuple[Frame, ...],
    server: Server | None,
    pieces: Pieces | None,
) -> Cause:
    others = _others(numbers)
    if others is not None:
        return others
    if symptom.kind == "nvml_hides_oom":
        text = (
            "An allocation failed, and the failure of NVML while the message was written hides how much was asked for."
        )
        ask = Candidate(
            "unknown",
            "Any allocation on a MIG instance or without NVML.",
            "the log before this line: memledger oom LOG",
        )
        return Cause("unknown", 0.5, text, "the line itself", (ask,))
    if symptom.kind == "memory_summary":
        return _summary(numbers)
    if symptom.rule.endswith(".xla_program_too_large"):
        return _program(symptom, numbers)
    fragmented = _in_pieces(pieces) if pieces is not None and pieces.fragmented is not None else _fragmented(numbers)
    if fragmented is not None:
        return fragmented
    outside = numbers.outside_torch_bytes
    # Graphs lie outside torch as well: where there are some, much outside says nothing of buffers.
    graphs = bool(numbers.private_pools_bytes)
    if outside is not None and outside >= COMMUNICATION_BYTES and phase in {"unknown", "start"} and not graphs:
        text = (
            f"This process holds {outside / GIB:.2f} GiB outside torch, far more than a context and libraries take: "
            "communication buffers (NCCL, NVSHMEM, DeepEP) or memory of another allocator."
        )
        ask = Candidate(
            "communication",
            "Buffers of NCCL or DeepEP.",
            "NCCL_DEBUG=INFO at the start; NCCL_BUFFSIZE, NVSHMEM_SYMMETRIC_SIZE",
        )
        return Cause("communication", 0.6, text, "arithmetic on the message", (ask,), (_lower(phase),))
    return _by_phase(symptom, numbers, phase, frames, server)


def _out_of_reach(numbers: Numbers, held: int) -> bool:
    """Whether the request would have failed as well with the memory of all other processes: then they are not the cause."""
    asked, free = numbers.requested_bytes, numbers.free_bytes
    return asked is not None and free is not None and asked > free + held + max(0, numbers.unaccounted_bytes or 0)


def _others(numbers: Numbers) -> Cause | None:
    """Another process, where the figures leave no other place for the memory."""
    total = numbers.total_bytes
    if total is None:
        return None
    listed = [other for other in numbers.other_processes if other.bytes]
    held = sum(other.bytes or 0 for other in listed)
    if _out_of_reach(numbers, held):
        return None
    if held > CONTEXT_BYTES and held > 0.03 * total:
        largest = max(listed, key=lambda other: other.bytes or 0)
        text = (
            f"Other processes hold {held / GIB:.2f} GiB of this GPU; the largest is process {largest.pid} "
            f"with {(largest.bytes or 0) / GIB:.2f} GiB."
        )
        advice = (
            Advice(
                "free",
                f"End process {largest.pid} if it is a leftover of a previous start; else share the GPU on purpose.",
            ),
            Advice("lower", "Or lower the fraction so that both fit."),
        )
        return Cause("other_process", 0.9, text, "the message lists them", advice=advice)
    rest = numbers.unaccounted_bytes
    if rest is None:
        return None
    # Without the figure of the process itself, its context and libraries are in the rest too.
    allowed = CONTEXT_BYTES if numbers.process_bytes is not None else 3 * CONTEXT_BYTES
    asked = numbers.requested_bytes or 0
    free = numbers.free_bytes or 0
    if rest > allowed and rest > 0.1 * total and free < max(asked, total // 20):
        text = f"{rest / GIB:.2f} GiB of the GPU are neither free nor this process's: another process holds them."
        end = Advice("free", "Find and end it; if it belongs there, lower the fraction.")
        return Cause("other_process", 0.65, text, "arithmetic on the message", (_who(),), (end,))
    return None


def _unallocated(numbers: Numbers) -> int | None:
    """What torch reserved and had not allocated; older messages print the two sums."""
    if numbers.reserved_unallocated_bytes is not None:
        return numbers.reserved_unallocated_bytes
    if numbers.torch_reserved_bytes is None or numbers.torch_allocated_bytes is None:
        return None
    return max(0, numbers.torch_reserved_bytes - numbers.torch_allocated_bytes)


def _in_pieces(pieces: Pieces) -> Cause | None:
    """Fragmentation as a memory snapshot shows it: it knows which pieces the request could have had."""
    if not pieces.fragmented:
        return None
    text = (
        f"{(pieces.usable_bytes or 0) / GIB:.2f} GiB lay unused where the {pieces.asked_bytes / GIB:.2f} GiB asked for could be placed, "
        f"in pieces of {(pieces.largest_bytes or 0) / GIB:.2f} GiB at most."
    )
    advice: tuple[Advice, ...] = (
        Advice("lower", "Segments are expandable already: lower the memory fraction ({fraction})."),
    )
    if not pieces.expandable:
        remedy = Remedy(("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",), (), "torch's allocator")
        advice = (Advice("change", "Expandable segments let torch join such pieces.", remedy),)
    return Cause("fragmentation", 0.9, text, "the memory snapshot", advice=advice)


def _fragmented(numbers: Numbers) -> Cause | None:
    rest, asked, total = _unallocated(numbers), numbers.requested_bytes, numbers.total_bytes
    if rest is None or asked is None or rest < asked or rest < FRAGMENTED_SHARE * (total or rest * 100):
        return None
    text = (
        f"torch holds {rest / GIB:.2f} GiB that is reserved and not allocated, more than the {asked / GIB:.2f} GiB asked for: "
        "it lies in pieces that are too small."
    )
    remedy = Remedy(("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",), (), "torch's allocator")
    advice = (Advice("change", "Expandable segments let torch join such pieces.", remedy),)
    return Cause("fragmentation", 0.7, text, "arithmetic on the message", advice=advice)


def _summary(numbers: Numbers) -> Cause:
    reserved, allocated = numbers.torch_reserved_bytes, numbers.torch_allocated_bytes
    if reserved and allocated is not None and reserved - allocated > reserved // 2:
        text = (
            f"torch reserved {reserved / GIB:.2f} GiB and had {allocated / GIB:.2f} GiB allocated: "
            "most of it lay in pieces that could not serve the request."
        )
        advice = (Advice("change", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets torch join such pieces."),)
        return Cause("fragmentation", 0.6, text, "the memory summary", advice=advice)
    return Cause("unknown", 0.3, "A memory summary of torch after an allocation failed.", "the memory summary")


def _program(symptom: Symptom, numbers: Numbers) -> Cause:
    """XLA refused a program at compile time: which of the engine's steps it is of, its traceback tells at most."""
    program, total = symptom.amounts.get("program_bytes"), numbers.total_bytes
    sizes = (
        f": it needs {program.bytes / GIB:.2f} GiB, and the device has {total / GIB:.2f} GiB"
        if program is not None and total is not None
        else ""
    )
    text = f"A program that XLA compiled does not fit the device's memory{sizes}. That is found before it runs."
    asked = (
        Candidate("weights", "The weights of a rank are too large for one device.", "the lines on loading before it"),
        Candidate("profiling", "The largest batch or context that is compiled for.", "the traceback above it"),
    )
    advice = (
        Advice("lower", "Lower what is compiled for ({chunk}, {requests}, {length})."),
        Advice("change", "Or spread the weights over more devices."),
    )
    return Cause("unknown", 0.5, text, "the line itself", asked, advice)


def _lower(phase: Phase) -> Advice:
    return Advice(
        "lower",
        "Lower the memory fraction ({fraction}): less for the pools, more for what comes after.",
    )


_PHASES: Final[dict[str, tuple[Kind, str]]] = {
    "weights": ("weights", "The weights do not fit on the device."),
    "profiling": ("profiling", "The profile run, a dummy batch of the largest size, does not fit beside the weights."),
    "pools": ("kv_pool", "The KV pool does not fit in what the weights left."),
    "graph_capture": ("graph_capture", "CUDA graph capture needed more than weights and pools left free."),
    "prefill": ("prefill", "A prefill batch needed more for its activations than weights, pools and graphs left free."),
    "decode": ("decode", "A decode step needed more than weights, pools and graphs left free."),
}


def _by_phase(
    symptom: Symptom, numbers: Numbers, phase: Phase, frames: tuple[Frame, ...], server: Server | None
) -> Cause:
    names = " ".join(frame.function or "" for frame in frames).lower()
    files = " ".join(frame.file for frame in frames).lower()
    if any(word in names for word in ("init_attention_backend", "flashinfer_backend", "workspace")):
        text = "A workspace of the attention backend, made after the pools, found too little free memory."
        return Cause("workspace", 0.7, text, "the traceback", advice=(_lower(phase),))
    if phase == "pools":
        if "mamba" in names or "state_pool" in names or "mamba" in files.rpartition(" ")[2]:
            text = "The recurrent-state pool, made for all request slots at once, does not fit."
            fewer = (Advice("lower", "Lower the state slots ({slots})."),)
            return Cause("state_pool", 0.7, text, "the traceback", advice=fewer)
        if "_allocate_kv_cache" in names and numbers.total_bytes is None and numbers.free_bytes is None:
            # vLLM's: it sizes the cache by the free memory that it has just measured (V0 cache_engine.py, V1 gpu_model_runner.py).
            text = (
                "The KV cache did not fit in the memory that vLLM had measured as free right before; the message has no figures. "
                "What the profile does not see is another process that takes memory meanwhile."
            )
            own = Candidate(
                "kv_pool", "The cache is too large for what the profile left.", "the whole line: memledger oom LOG"
            )
            return Cause("other_process", 0.5, text, "the traceback", (_who(), own), _pool_advice())
        return Cause("kv_pool", 0.7, _PHASES["pools"][1], "where it happened", advice=_pool_advice())
    if phase == "warmup":
        return _warmup(numbers, server)
    if phase == "wake_up":
        text = "The memory that was given up while asleep could not be taken back: somebody else took it meanwhile."
        own = Candidate("kv_pool", "The engine itself kept more than it gave back.", WHO)
        end = Advice("free", "End what took the memory, or wake the server before another one starts.")
        return Cause("other_process", 0.6, text, "where it happened", (_who(), own), (end,))
    if phase in _PHASES:
        kind, text = _PHASES[phase]
        # The line itself may say it ("Capture cuda graph failed", "Failed to load model").
        sure = 0.9 if symptom.phase_hint is not None else 0.7
        return Cause(
            kind, sure, text, "the line itself" if sure > 0.7 else "where it happened", (), _advice(kind, phase)
        )
    return _unsure(symptom, numbers, phase, starting=bool(_STARTING & set(names.split())))


def _pool_advice() -> tuple[Advice, ...]:
    return (
        Advice(
            "lower",
            "Lower the memory fraction ({fraction}): the pool is larger than what is free.",
        ),
    )


def _advice(kind: Kind, phase: Phase) -> tuple[Advice, ...]:
    if kind == "weights":
        return (
            Advice(
                "change",
                "Use more GPUs (tensor parallel), a quantised copy, or offload; no memory fraction makes weights fit.",
            ),
        )
    if kind == "profiling":
        return (
            Advice(
                "lower",
                "Lower the batch that is profiled ({chunk}, {requests}, images per prompt).",
            ),
            Advice("change", "Or leave more beside the weights: more GPUs or a quantised copy."),
        )
    if kind == "graph_capture":
        return (
            _lower(phase),
            Advice(
                "lower",
                "Or capture fewer sizes ({capture}), or none ({eager}).",
            ),
        )
    if kind == "prefill":
        return (
            Advice(
                "lower",
                "Lower the prefill chunk ({chunk}): activations grow with its tokens.",
            ),
            _lower(phase),
        )
    return (_lower(phase),)


def _warmup(numbers: Numbers, server: Server | None) -> Cause:
    captured = bool(numbers.private_pools_bytes) or (
        server is not None
        and any(
            entry.account.startswith("cuda_graphs/") and entry.bytes > 0
            for rank in server.ranks
            for entry in rank.entries
        )
    )
    if captured or (server is not None and server.framework == "vllm"):
        text = "Warm-up right after CUDA graph capture found too little: pools and graphs had taken the headroom."
        ask = Candidate(
            "warmup",
            "The warm-up itself (a sampler run for all sequences) is what is large.",
            "start once with a lower --max-num-seqs",
        )
        return Cause("graph_capture", 0.6, text, "where it happened", (ask,), _advice("graph_capture", "warmup"))
    text = "Warm-up found less free memory than it needed: weights and pools had taken the headroom."
    return Cause("warmup", 0.6, text, "where it happened", advice=(_lower("warmup"),))


def _unsure(symptom: Symptom, numbers: Numbers, phase: Phase, *, starting: bool) -> Cause:
    """Where the phase is not in the input: what the figures of the message fit best, and what else they may be."""
    asked, rest, total = numbers.requested_bytes, _unallocated(numbers), numbers.total_bytes
    crossing = "the log from the start of the server to this line: memledger oom LOG"
    if asked is not None and total is not None and asked > total:
        text = f"One tensor of {asked / GIB:.2f} GiB, more than the device has: a dummy batch of the largest input, most likely of the profile run."
        ask = Candidate("prefill", "A single huge input while serving.", crossing)
        return Cause("profiling", 0.5, text, "the size asked for", (ask,), _advice("profiling", phase))
    if phase in _SERVING or numbers.private_pools_bytes:
        if symptom.kind == "cuda_error":
            text = "CUDA ran out of memory outside torch's allocator while serving: what the driver loads or takes on first use found nothing."
            ask = Candidate("prefill", "A prefill batch took the rest.", crossing)
            return Cause("decode", 0.4, text, "where it happened", (ask,), (_lower("serving"),))
        text = "A batch needed more for its activations than weights, pools and graphs left free."
        ask = Candidate(
            "decode",
            "A decode step with many sequences (logits, LoRA, sampling).",
            "the last batch lines before the failure",
        )
        return Cause(
            "prefill", 0.5, text, "graphs exist: the server was serving", (ask,), _advice("prefill", "prefill")
        )
    if symptom.kind == "cuda_error":
        text = "CUDA itself ran out of memory (outside torch's allocator); the message has no figures."
        ask = Candidate("graph_capture", "Graph instantiation, which allocates outside torch.", crossing)
        return Cause("decode", 0.3, text, "the wording", (ask,), (_lower(phase),))
    if rest is None and asked is not None and asked >= GIB and starting:
        text = f"While the server started, one tensor of {asked / GIB:.2f} GiB did not fit: most likely of a pool."
        ask = Candidate("weights", "A large tensor of the weights.", crossing)
        return Cause("kv_pool", 0.4, text, "the traceback and the size", (ask,), _pool_advice())
    if asked is None or rest is None:
        return Cause(
            "unknown",
            0.2,
            "Device memory ran out; the message does not say when.",
            "the wording",
            (Candidate("unknown", "Any phase.", crossing),),
        )
    if rest < STATIC_REST_BYTES:
        large = asked >= GIB
        text = (
            f"Next to nothing is reserved and unallocated ({rest / MIB:.0f} MiB), as while tensors are made that stay: "
            + ("a pool tensor of this size." if large else "the weights.")
        )
        ask = Candidate(
            "weights" if large else "kv_pool", "The weights." if large else "A layer of the KV pool.", crossing
        )
        kind: Kind = "kv_pool" if large else "weights"
        advice = _pool_advice() if large else _advice("weights", "weights")
        return Cause(kind, 0.5, text, "arithmetic on the message", (ask,), advice)
    text = "No graphs exist yet and activations were allocated: most likely the profile run or the first batches."
    ask = Candidate("prefill", "A prefill batch of a server without graphs.", crossing)
    return Cause("profiling", 0.4, text, "arithmetic on the message", (ask,), _advice("profiling", phase))
