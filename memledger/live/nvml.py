"""What NVIDIA's management library (NVML) shows of the GPUs: the only place that calls `pynvml`.

Every query gives a value, or leaves its field None with a sentence in `missing`. Nothing here raises, hangs, creates a CUDA
context or writes. The distribution is `nvidia-ml-py`; calls and structures are those of NVIDIA's `nvml.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import importlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Literal

import msgspec

from memledger.ledger import Source
from memledger.live import meminfo
from memledger.live.machine import ROOT, is_integrated, no_library, not_nvidia, under_wsl
from memledger.live.sample import Device, DeviceSample, GpuProcess, MemoryCall
from memledger.sanitize import clean
from memledger.units import KIB, MIB, NOT_AVAILABLE_FROM

DEADLINE_S: Final = 2.0
"""A call that takes longer is given up: the driver hangs."""

INIT_DEADLINE_S: Final = 6.0
"""The first call wakes the GPUs: without persistence mode that takes seconds on a machine with many."""

PROCESS_INTERVAL_S: Final = 1.0
"""Process lists are asked for at most this often: the driver holds a lock meanwhile. Memory figures are always fresh."""

RETIRED_PAGE_BYTES: Final = 64 * KIB
"""Size of a retired page (NVIDIA, "Dynamic Page Retirement": 64 KiB of frame buffer each)."""

MAX_PID: Final = 2**22
"""Linux's largest process id; a list with a larger one, or with 0, was read with the wrong structure."""

# nvml.h, nvmlReturn_t
_UNINITIALIZED: Final = 1
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_NOT_FOUND: Final = 6
_DRIVER_NOT_LOADED: Final = 9
_TIMEOUT: Final = 10
_LIBRARY_NOT_FOUND: Final = 12
_FUNCTION_NOT_FOUND: Final = 13
_GPU_IS_LOST: Final = 15
_RESET_REQUIRED: Final = 16
_OPERATING_SYSTEM: Final = 17
_MISMATCH: Final = 18
_VERSION_MISMATCH: Final = 25

_REASONS: Final = {
    _UNINITIALIZED: "NVML was shut down in between",
    _NOT_SUPPORTED: "not supported by this GPU or its driver",
    _NO_PERMISSION: "no permission: run as root or as the user who may use the GPU",
    _NOT_FOUND: "the driver does not know it",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: `sudo modprobe nvidia`, or reboot",
    _TIMEOUT: "the driver gave up waiting for the GPU: see `dmesg` for Xid lines",
    _FUNCTION_NOT_FOUND: "this driver is too old for the call",
    _GPU_IS_LOST: "the GPU has fallen off the bus: see `dmesg` for Xid 79, then reset it or reboot",
    _RESET_REQUIRED: "the GPU needs a reset: `sudo nvidia-smi --gpu-reset`, or reboot",
    _OPERATING_SYSTEM: "the operating system blocks access to the GPU: check the device permissions of the container",
    _MISMATCH: "driver and library are of different versions (an update without a restart): reboot or reload the module",
    _VERSION_MISMATCH: "driver and nvidia-ml-py disagree on the call's structure",
}
_OLDER_CALL: Final = frozenset({_FUNCTION_NOT_FOUND, _VERSION_MISMATCH, _NOT_SUPPORTED})
# A handle or the library itself is of no use any more.
_STALE: Final = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _GPU_IS_LOST, _RESET_REQUIRED, _MISMATCH, _NOT_FOUND})

_ADDRESSING_ATS: Final = 2
_NO_INSTANCE: Final = 0xFFFFFFFF
_MEMORY_FIELDS: Final = ("total_bytes", "reserved_bytes", "used_bytes", "free_bytes")
_LISTS: Final[tuple[tuple[str, Literal["compute", "graphics", "mps"]], ...]] = (
    ("nvmlDeviceGetComputeRunningProcesses", "compute"),
    ("nvmlDeviceGetGraphicsRunningProcesses", "graphics"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", "mps"),
)
# Where drivers put the library when the loader does not look there: WSL, old container runtimes, NixOS, Colab.
_LIBRARY_FOLDERS: Final = ("usr/lib/wsl/lib", "usr/local/nvidia/lib64", "run/opengl-driver/lib", "usr/lib64-nvidia")


class UnavailableError(Exception):
    """A query without an answer; `code` is NVML's, `reason` one sentence."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def sample(*, processes: bool = True, root: Path = ROOT) -> DeviceSample:
    """All GPUs and MIG instances now. For repeated samples keep a `Sampler`.

    Args:
        processes: ask for the process lists too.
        root: folder that stands for `/`.
    """
    with Sampler(root=root) as sampler:
        return sampler.sample(processes=processes)


class Sampler:
    """Keeps NVML open between samples; close it, or use it in a `with` statement.

    Safe to use from several threads (one sample at a time) and after a fork: the child opens NVML anew and leaves the
    parent's alone.
    """

    def __init__(
        self,
        *,
        root: Path = ROOT,
        deadline_s: float = DEADLINE_S,
        init_deadline_s: float = INIT_DEADLINE_S,
        process_interval_s: float = PROCESS_INTERVAL_S,
    ) -> None:
        self._root = root
        self._deadline_s = deadline_s
        self._init_deadline_s = init_deadline_s
        self._process_interval_s = process_interval_s
        self._stuck: list[_Caller] = []
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._stuck.clear()
        self._caller = _Caller()
        self._library: Any = None
        self._cards: dict[int, _Card] = {}
        self._remark: str | None = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down. Never waits for a driver that hangs. A closed sampler opens again when it is asked again."""
        if self._owner != os.getpid():
            self._start()
            return
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._library is not None and not self._caller.waiting:
            with contextlib.suppress(UnavailableError):
                self._caller.call(self._library.nvmlShutdown, deadline_s=self._deadline_s)
        self._caller.stop()
        self._library, self._cards = None, {}
        if self._caller.waiting:
            self._stuck.append(self._caller)
        self._caller = _Caller()

    def sample(self, *, processes: bool = True) -> DeviceSample:
        """All GPUs and MIG instances now; the process lists may be up to `process_interval_s` old."""
        if self._owner != os.getpid():
            self._start()
        with self._lock:
            return self._sample(processes)

    def _sample(self, processes: bool) -> DeviceSample:
        taken_at = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._stuck = [caller for caller in self._stuck if caller.waiting]
        if self._stuck:
            return _unavailable(f"{self._stuck[0].reason}; still no answer", taken_at)
        try:
            self._open()
            count = self._ask("nvmlDeviceGetCount")
        except UnavailableError as error:
            self._close()
            return _unavailable(self._why_not(error), taken_at)
        driver = self._text("nvmlSystemGetDriverVersion")
        cuda = self._text("nvmlSystemGetCudaDriverVersion_v2")
        devices = tuple(device for index in range(count) for device in self._devices(index, processes))
        source = _source(devices, self._remark, processes=processes)
        return DeviceSample(source, driver, _cuda_version(cuda), taken_at, devices)

    # ---- calls ----

    def _open(self) -> None:
        if self._library is not None:
            return
        library = self._caller.call(_load, deadline_s=self._init_deadline_s)
        self._remark = _check_package(library)
        try:
            self._caller.call(library.nvmlInit, deadline_s=self._init_deadline_s)
        except UnavailableError as error:
            if error.code != _LIBRARY_NOT_FOUND or not _load_from_folders(self._root):
                raise
            self._caller.call(library.nvmlInit, deadline_s=self._init_deadline_s)
        self._library = library

    def _why_not(self, error: UnavailableError) -> str:
        """The reason for no sample at all, by what the machine shows besides."""
        if error.code == _LIBRARY_NOT_FOUND:
            return no_library(self._root)
        if error.code in {_DRIVER_NOT_LOADED, _NOT_SUPPORTED}:
            return not_nvidia(self._root) or error.reason
        return error.reason

    def _ask(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name, None)
        if function is None:
            raise UnavailableError("this version of nvidia-ml-py does not know the call", _FUNCTION_NOT_FOUND)
        if self._caller.reason is not None:
            self._stuck.append(self._caller)
            if len(self._stuck) > 1:
                # Each further GPU would cost the deadline again.
                raise UnavailableError("not asked: the driver did not answer for other GPUs", _TIMEOUT)
            self._caller = _Caller()
        return self._caller.call(function, *arguments, deadline_s=self._deadline_s)

    def _text(self, name: str) -> Any:
        try:
            return self._ask(name)
        except UnavailableError:
            return None

    # ---- one GPU ----

    def _devices(self, index: int, processes: bool) -> Iterator[Device]:
        card = self._cards.get(index)
        if card is None:
            query = _Query(self._ask)
            handle = query.ask("device", "nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                reason = query.missing["device"]
                yield Device(index=index, missing=dict.fromkeys(("uuid", *_MEMORY_FIELDS, "processes"), reason))
                return
            card = self._cards[index] = self._card(query, handle, index)
        query = _Query(self._ask, card.missing)
        memory = self._memory(query, card)
        mig = query.ask("mig_mode", "nvmlDeviceGetMigMode", card.handle)
        divided = None if mig is None else bool(mig[0])
        instances = list(self._instances(query, card)) if divided else []
        rows = self._rows(query, card, processes)
        device = msgspec.structs.replace(
            card.device,
            **memory,
            mig_mode=divided,
            processes=None if rows is None else _merged(row for row in rows if not (instances and row.in_instance)),
            missing=query.missing,
        )
        device = self._judged(device)
        if divided:
            device = _noted(device, f"MIG is on: its {len(instances)} instances are listed on their own")
        if query.stale:
            del self._cards[index]
        yield device
        for instance in instances:
            yield self._instance(card, instance, device, rows, processes)

    def _card(self, query: _Query, handle: Any, index: int) -> _Card:
        """What does not change while the driver is loaded."""
        name = query.ask("name", "nvmlDeviceGetName", handle)
        uuid = query.ask("uuid", "nvmlDeviceGetUUID", handle)
        pci = query.ask("pci_bus", "nvmlDeviceGetPciInfo", handle)
        ecc = query.ask("ecc", "nvmlDeviceGetEccMode", handle)
        lost, notes = _lost_capacity(query, handle)
        device = Device(
            index=index,
            uuid=None if uuid is None else clean(uuid),
            name=None if name is None else clean(name),
            pci_bus=None if pci is None else _decoded(pci.busId),
            lost_bytes=lost,
            ecc=None if ecc is None else bool(ecc[0]),
            notes=notes,
        )
        return _Card(handle, device, dict(query.missing))

    def _memory(self, query: _Query, card: _Card) -> dict[str, Any]:
        """The memory figures of a GPU, and whether it uses the machine's memory."""
        found = _memory_of(query, card.handle, self._library)
        code = query.codes.get("total_bytes")
        if not self._shares_memory(query, card, found.get("total_bytes"), code):
            return {**found, "unified_memory": False if found.get("total_bytes") is not None else None}
        host = meminfo.read(root=self._root)
        if host.total_bytes is None or host.available_bytes is None:
            return {**found, "unified_memory": True}
        for field in _MEMORY_FIELDS:
            query.missing.pop(field, None)
        query.missing["reserved_bytes"] = "the driver's reserve is not told apart in the machine's own memory"
        call: MemoryCall = "meminfo"
        return {
            "total_bytes": host.total_bytes,
            "reserved_bytes": None,
            "used_bytes": host.total_bytes - host.available_bytes,
            "free_bytes": host.available_bytes,
            "page_cache_bytes": host.page_cache_bytes,
            "unified_memory": True,
            "memory_call": call,
        }

    def _shares_memory(self, query: _Query, card: _Card, total: int | None, code: int | None) -> bool:
        """Whether the GPU has no memory of its own.

        Drivers answer "not supported" for the memory of such a GPU, or give the machine's total. Neither is enough:
        another GPU's call may fail too, and the machine's figures must not stand for a card's. So the name or the
        addressing mode (ATS: the GPU walks the CPU's page tables) has to say it as well.
        """
        host_total = meminfo.read(root=self._root).total_bytes
        same = total is not None and host_total is not None and 0.9 * host_total <= total <= 1.02 * host_total
        if not same and not (total is None and code == _NOT_SUPPORTED):
            return False
        if is_integrated(card.device.name) or (self._root / "etc/nv_tegra_release").exists():
            return True
        with contextlib.suppress(UnavailableError):
            return bool(self._ask("nvmlDeviceGetAddressingMode", card.handle) == _ADDRESSING_ATS)
        return False

    def _judged(self, device: Device) -> Device:
        """Processes that can't hold what they are said to hold have no figure; lists that need a word get one."""
        if device.processes is None:
            return device
        limit, wsl = device.total_bytes, under_wsl(self._root)
        processes = tuple(_plausible(process, limit, wsl=wsl) for process in device.processes)
        return msgspec.structs.replace(device, processes=processes)

    # ---- processes ----

    def _rows(self, query: _Query, card: _Card, processes: bool) -> list[_Row] | None:
        if not processes:
            query.missing["processes"] = "not asked for"
            return None
        now = time.monotonic()
        if card.listed_at is not None and now - card.listed_at < self._process_interval_s:
            if card.rows is None:
                query.missing["processes"] = card.no_rows or ""
            return card.rows
        card.rows = _process_rows(query, card.handle)
        card.no_rows = query.missing.get("processes")
        card.listed_at = now
        return card.rows

    # ---- MIG ----

    def _instances(self, query: _Query, card: _Card) -> Iterator[Any]:
        """Handles of the GPU's MIG devices; indices may have holes."""
        count = query.ask("mig_mode", "nvmlDeviceGetMaxMigDeviceCount", card.handle)
        for index in range(count or 0):
            try:
                yield self._ask("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, index)
            except UnavailableError as error:
                if error.code != _NOT_FOUND:
                    query.missing["mig_mode"] = f"MIG device {index}: {error.reason}"

    def _instance(
        self, card: _Card, handle: Any, parent: Device, parent_rows: list[_Row] | None, processes: bool
    ) -> Device:
        query = _Query(self._ask)
        uuid = query.ask("uuid", "nvmlDeviceGetUUID", handle)
        own = card.instances.setdefault(uuid or "", _Card(handle, parent, {}))
        name = query.ask("name", "nvmlDeviceGetName", handle)
        ids = tuple(
            query.ask(field, call, handle)
            for field, call in (
                ("gpu_instance", "nvmlDeviceGetGpuInstanceId"),
                ("compute_instance", "nvmlDeviceGetComputeInstanceId"),
            )
        )
        memory = _memory_of(query, handle, self._library)
        if not self._own_figures(handle, memory, parent):
            memory = {}
            query.missing.update(
                dict.fromkeys(_MEMORY_FIELDS, "the driver gives the whole GPU's figures for this MIG instance")
            )
        rows = self._rows(query, own, processes)
        if rows is None and processes and parent_rows is not None and None not in ids:
            rows = [row for row in parent_rows if (row.gpu_instance, row.compute_instance) == ids]
            query.missing.pop("processes", None)
        device = Device(
            index=parent.index,
            uuid=None if uuid is None else clean(uuid),
            name=None if name is None else clean(name),
            parent_uuid=parent.uuid,
            pci_bus=parent.pci_bus,
            unified_memory=parent.unified_memory,
            ecc=parent.ecc,
            gpu_instance=ids[0],
            compute_instance=ids[1],
            processes=None if rows is None else _merged(rows),
            missing=query.missing,
            **memory,
        )
        return self._judged(device)

    def _own_figures(self, handle: Any, memory: dict[str, Any], parent: Device) -> bool:
        """Whether the figures are the instance's: some drivers answer with the whole GPU's."""
        total = memory.get("total_bytes")
        if total is None:
            return True
        try:
            size = int(self._ask("nvmlDeviceGetAttributes_v2", handle).memorySizeMB) * MIB
        except UnavailableError:
            return parent.total_bytes is None or total < parent.total_bytes
        return bool(abs(total - size) <= max(size // 50, MIB))


# ---- one call ----


class _Job:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


class _Caller:
    """Makes calls one after the other in a thread that may be left behind when one of them never returns."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up: _Job | None = None
        self.reason: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether a call that was given up has still not returned."""
        return self._given_up is not None and not self._given_up.done.is_set()

    def call(self, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
        if self.reason is not None:
            raise UnavailableError(self.reason, _TIMEOUT)
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="nvml", daemon=True)
            self._thread.start()
        job = _Job(function, arguments)
        self._jobs.put(job)
        if not job.done.wait(deadline_s):
            name = getattr(function, "__name__", "a call")
            self._given_up = job
            self.reason = f"the driver did not answer {name} within {deadline_s:g} s: it hangs (see `dmesg`; `nvidia-smi` will hang too)"
            raise UnavailableError(self.reason, _TIMEOUT)
        if job.error is not None:
            raise _typed(job.error) from job.error
        return job.value

    def stop(self) -> None:
        """Let the thread end when it has nothing more to do."""
        if self._thread is not None:
            self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.value = job.function(*job.arguments)
        except Exception as error:
            job.error = error
        job.done.set()


def _typed(error: Exception) -> UnavailableError:
    """NVML's error with its remedy. `str()` of a pynvml error may call the driver: only its number is used."""
    if isinstance(error, UnavailableError):
        return error
    code = getattr(error, "value", None)
    if isinstance(code, int):
        return UnavailableError(_REASONS.get(code, f"NVML answers with error {code}"), code)
    return UnavailableError(f"nvidia-ml-py failed: {clean(f'{type(error).__name__}: {error}', 120)}")


# ---- the library ----


def _load() -> ModuleType:
    """`pynvml`, imported when it is first needed."""
    try:
        with warnings.catch_warnings():
            # The deprecated distribution warns on import; we say it in our own words.
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except ImportError as error:
        raise UnavailableError("the Python package nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    except Exception as error:
        raise UnavailableError(f"the module pynvml can't be imported ({type(error).__name__}): {_REINSTALL}") from error


_REINSTALL: Final = "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py"
_NEEDED: Final = (
    "nvmlInit",
    "nvmlShutdown",
    "NVMLError",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlMemory_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
)


def _check_package(library: Any) -> str | None:
    """A remark where the deprecated distribution `pynvml` is installed as well.

    Raises:
        UnavailableError: the module is not nvidia-ml-py's, or too old.
    """
    lacking = [name for name in _NEEDED if not hasattr(library, name)]
    if lacking:
        place = clean(str(getattr(library, "__file__", None)), 200)
        raise UnavailableError(f"the module pynvml ({place}) is not that of nvidia-ml-py 12.560 or newer: {_REINSTALL}")
    return _deprecated_package()


@functools.lru_cache(maxsize=1)
def _deprecated_package() -> str | None:
    from importlib import metadata

    try:
        version = metadata.version("pynvml")
    except metadata.PackageNotFoundError:
        return None
    return f"the deprecated package pynvml {clean(version, 20)} is installed beside nvidia-ml-py: {_REINSTALL}"


def _load_from_folders(root: Path) -> bool:
    """Open the library where the loader does not look; it then answers to its name for the whole process."""
    for folder in _LIBRARY_FOLDERS:
        path = root / folder / "libnvidia-ml.so.1"
        if path.exists():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
                return True
    return False


# ---- answers of one device ----


class _Card:
    """A GPU or MIG device that stays open: its handle, what does not change, and its last process list."""

    def __init__(self, handle: Any, device: Device, missing: dict[str, str]) -> None:
        self.handle = handle
        self.device = device
        self.missing = missing
        self.rows: list[_Row] | None = None
        self.no_rows: str | None = None
        self.listed_at: float | None = None
        self.instances: dict[str, _Card] = {}


class _Query:
    """Asks about one device and keeps the reason of each answer that it did not get."""

    def __init__(self, ask: Callable[..., Any], missing: dict[str, str] | None = None) -> None:
        self._ask = ask
        self.missing: dict[str, str] = dict(missing or {})
        self.codes: dict[str, int | None] = {}
        self.hung: UnavailableError | None = None

    @property
    def stale(self) -> bool:
        """Whether the device has to be opened again for the next sample."""
        return self.hung is not None or any(code in _STALE for code in self.codes.values())

    def ask(self, field: str, name: str, *arguments: Any, older: frozenset[int] = frozenset()) -> Any:
        """The answer, or None with the reason under `field`; errors in `older` are raised for the caller to try another call."""
        try:
            if self.hung is not None:
                raise self.hung
            return self._ask(name, *arguments)
        except UnavailableError as error:
            if error.code == _TIMEOUT:
                self.hung = error
            if error.code in older:
                raise
            self.missing[field] = error.reason
            self.codes[field] = error.code
            return None


def _memory_of(query: _Query, handle: Any, library: Any) -> dict[str, Any]:
    """Total, reserved, used and free: total = reserved + used + free (`nvmlDeviceGetMemoryInfo_v2`).

    The older call counts what the driver reserves as used.
    """
    call: MemoryCall = "nvml v2"
    try:
        answer = query.ask("total_bytes", "nvmlDeviceGetMemoryInfo", handle, library.nvmlMemory_v2, older=_OLDER_CALL)
    except UnavailableError:
        call = "nvml v1"
        answer = query.ask("total_bytes", "nvmlDeviceGetMemoryInfo", handle)
    if answer is None:
        query.missing.update(dict.fromkeys(_MEMORY_FIELDS, query.missing["total_bytes"]))
        return {}
    total = _figure(answer.total) or None
    found = {
        "total_bytes": total,
        "reserved_bytes": _figure(answer.reserved, total) if call == "nvml v2" else None,
        "used_bytes": _figure(answer.used, total),
        "free_bytes": _figure(answer.free, total),
    }
    for field, value in found.items():
        if value is None:
            query.missing[field] = "the driver gives no figure"
    if call == "nvml v1":
        query.missing["reserved_bytes"] = "this driver only has the older call: what it reserves is counted as used"
    return {**found, "memory_call": call}


def _figure(value: int | None, limit: int | None = None) -> int | None:
    """Bytes; None for all-ones ("not available") and for more than the device has."""
    if value is None or not 0 <= value < NOT_AVAILABLE_FROM or (limit is not None and value > limit):
        return None
    return int(value)


def _lost_capacity(query: _Query, handle: Any) -> tuple[int | None, tuple[str, ...]]:
    """Bytes that memory faults took away for good, and what a reset will change.

    Before Ampere whole pages are retired. Later GPUs remap rows to spare ones, which costs no capacity.
    """
    notes = []
    pages = None
    for cause in (0, 1):  # nvmlPageRetirementCause_t: repeated single-bit errors, double-bit error
        found = query.ask("lost_bytes", "nvmlDeviceGetRetiredPages", handle, cause)
        if found is not None:
            pages = (pages or 0) + len(found)
    lost = None if pages is None else pages * RETIRED_PAGE_BYTES
    if pages:
        notes.append(f"{pages} pages of 64 KiB are retired because of memory faults")
    rows = query.ask("remapped", "nvmlDeviceGetRemappedRows", handle)
    query.missing.pop("remapped", None)
    if rows is not None:
        corrected, uncorrected, pending, failure = rows
        lost = lost or 0
        if corrected or uncorrected:
            notes.append(f"{corrected + uncorrected} memory rows are remapped to spare ones, which costs no capacity")
        if pending:
            notes.append("memory rows wait to be remapped: reset the GPU")
        if failure:
            notes.append("a memory row could not be remapped: the GPU needs service")
    if lost is not None:
        query.missing.pop("lost_bytes", None)
    return lost, tuple(notes)


class _Row(msgspec.Struct, frozen=True):
    """One line of a process list as NVML gives it."""

    pid: int
    used_bytes: int | None
    kind: Literal["compute", "graphics", "mps"]
    gpu_instance: int | None = None
    compute_instance: int | None = None

    @property
    def in_instance(self) -> bool:
        return self.gpu_instance is not None


def _process_rows(query: _Query, handle: Any) -> list[_Row] | None:
    """The compute, graphics and MPS lists; None where not even the first is to be had."""
    rows: list[_Row] = []
    for name, kind in _LISTS:
        found = _one_list(query, handle, name, "processes" if kind == "compute" else f"{kind}_processes")
        if found is None:
            if kind == "compute":
                return None
            # Servers compute: a GPU without graphics or MPS lists loses nothing that belongs in a ledger of theirs.
            query.missing.pop(f"{kind}_processes", None)
            continue
        rows += [
            _Row(
                int(row.pid),
                _figure(row.usedGpuMemory),
                kind,
                _instance_id(getattr(row, "gpuInstanceId", None)),
                _instance_id(getattr(row, "computeInstanceId", None)),
            )
            for row in found
        ]
    return rows


def _one_list(query: _Query, handle: Any, name: str, field: str) -> list[Any] | None:
    reason = "this driver is too old for the process list"
    for version in ("_v3", "_v2"):
        try:
            found = query.ask(field, name + version, handle, older=_OLDER_CALL)
        except UnavailableError as error:
            if error.code == _NOT_SUPPORTED:
                reason = error.reason
            continue
        if found is None:
            return None
        if all(0 < int(row.pid) <= MAX_PID for row in found):
            return list(found)
        reason = (
            "the driver's process list has process ids that can't be: its structure is not the one nvidia-ml-py knows"
        )
    query.missing[field] = reason
    return None


def _instance_id(value: int | None) -> int | None:
    return None if value is None or value == _NO_INSTANCE else int(value)


_ORDER: Final = {"mps": 0, "compute": 1, "graphics": 2}


def _merged(rows: Iterator[_Row] | list[_Row]) -> tuple[GpuProcess, ...]:
    """One entry a process: a process in two lists has the same figure in both, so the larger known one is it."""
    found: dict[int, GpuProcess] = {}
    for row in rows:
        before = found.get(row.pid)
        figures = (row.used_bytes, None if before is None else before.used_bytes)
        used = [value for value in figures if value is not None]
        kind = row.kind if before is None or _ORDER[row.kind] < _ORDER[before.kind] else before.kind
        found[row.pid] = GpuProcess(pid=row.pid, used_bytes=max(used, default=None), kind=kind)
    return tuple(found[pid] for pid in sorted(found))


def _plausible(process: GpuProcess, total: int | None, *, wsl: bool) -> GpuProcess:
    used = process.used_bytes
    if used is not None and (total is None or used <= total):
        return process
    if used is not None:
        reason = "the driver's figure is larger than the device"
    elif wsl:
        reason = "under WSL the driver does not tell memory by process"
    else:
        reason = "the driver does not tell this process's memory (no permission, Windows driver model or vGPU)"
    return msgspec.structs.replace(process, used_bytes=None, missing={"used_bytes": reason})


# ---- the whole sample ----


def _noted(device: Device, note: str) -> Device:
    return msgspec.structs.replace(device, notes=(*device.notes, note))


def _unavailable(reason: str, taken_at: str) -> DeviceSample:
    return DeviceSample(Source("nvml", "unavailable", reason), taken_at=taken_at)


def _source(devices: tuple[Device, ...], remark: str | None, *, processes: bool) -> Source:
    """`ok` where every device has its memory and, if asked for, its processes; else the first thing that is missing."""
    if not devices:
        return Source(
            "nvml", "partial", "the driver shows no GPU here: none is given to this container, or none is installed"
        )
    wanted = ("total_bytes", "used_bytes", "free_bytes", *(("processes",) if processes else ()))
    for device in devices:
        for field in wanted:
            if getattr(device, field) is None:
                what = {"processes": "process list"}.get(field, "memory")
                label = f"GPU {device.index}" if device.parent_uuid is None else f"MIG instance {device.uuid}"
                return Source("nvml", "partial", f"{label}: no {what}: {device.missing.get(field, 'not available')}")
    return Source("nvml", "ok", remark)


def _cuda_version(number: int | None) -> str | None:
    """NVML counts 1000 * major + 10 * minor."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _decoded(value: bytes | str) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)
