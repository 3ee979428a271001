"""The exception that a process died of, where no rule about memory says more: its kind, and which are wrappers only."""

from __future__ import annotations

import re
from typing import Any, Final

from memledger.events import Event
from memledger.ledger import Failure
from memledger.sanitize import clean

LONGEST_CAUSE: Final = 300

_WRAPPERS: Final = re.compile(
    r"(?:Engine(?:Dead|Generate)\w*|RayTask|RayActor|ActorDied|CalledProcess|ChildFailed|ProcessRaised|ProcessExited"
    r"|BrokenPipe|ConnectionReset|ConnectionRefused|Cancelled)(?:Error|Exception)?"
)
_WRAPPER_TEXTS: Final = re.compile(
    r"Worker failed with error|Engine core initialization failed|Engine core proc|EngineCore encountered|EngineCore failed"
    r"|Engine process failed|WorkerProc initialization failed|Worker process died|Executor failed|cancelled"
    r"|Rank \d+ scheduler died|Initialization failed|Failed to start|Child process|Engine loop|Background loop"
)
_OF_A_REQUEST: Final = re.compile(
    r"VLLMValidationError|HTTPException|RequestValidationError|BadRequestError|JSONDecodeError|ClientDisconnect"
    r"|UnprocessableEntity|NotFoundError|TemplateError|UndefinedError"
)
_REQUEST_TEXTS: Final = re.compile(
    r"maximum context length|longer than the (?:maximum )?model|is longer than the model's"
)
_DEVICE: Final = re.compile(
    r"CUDA [Ee]rror|HIP [Ee]rror|CUDA driver error|cudaSuccess|cudaError|hipError|CUresult|device-side assert|illegal memory access"
)
_LIBRARY: Final = re.compile(
    r"\b(?:NCCL|RCCL|HCCL|NVSHMEM|CUBLAS|CUDNN|cuBLAS|cuDNN|cutlass|cublas|nvshmem|flashinfer)"
)
_CONFIG_TYPES: Final = frozenset({"ValidationError", "HFValidationError", "ArgumentError", "ConfigError"})


EXCEPTION_RULES: Final = frozenset(
    {
        "exception",
        "on_chip_memory",
        "workspace_overflow",
        "illegal_access",
        "size_bug",
        "buffer_alloc_failed",
        "library_init_failed",
    }
)
"""Rules for ends of tracebacks that are no memory failure for certain: what they mean for memory, the postmortem says."""

_ENDS_TRACEBACK: Final = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}(?P<type>[A-Z]\w*(?:Error|Exception)): (?P<text>[^\n]*)")


def ends_traceback(event: Event) -> bool:
    """Whether a line that has a rule of its own is also the end of a traceback."""
    return _ENDS_TRACEBACK.match(event.message) is not None


def _said(event: Event) -> tuple[str | None, str | None]:
    """The exception's class and text."""
    if event.id == "exception":
        return event.word("type"), event.word("text")
    found = _ENDS_TRACEBACK.match(event.message)
    return (found["type"], found["text"]) if found is not None else (None, event.message)


def is_wrapper(event: Event) -> bool:
    """Whether an exception only says that another process, or the exception before it, failed."""
    kind, text = _said(event)
    return _WRAPPERS.fullmatch(kind or "") is not None or _WRAPPER_TEXTS.match(text or "") is not None


def is_requests(event: Event) -> bool:
    """Whether an exception is the answer to one request: the server goes on."""
    kind, text = _said(event)
    return bool(_OF_A_REQUEST.search(kind or "") or _REQUEST_TEXTS.search(text or ""))


def kind_of(event: Event, *, before_engine: bool = False) -> str:
    """What kind of failure an exception is: the device's, a library's, the configuration's, or a plain exception.

    Args:
        event: the line that the traceback ends with.
        before_engine: raised before any engine or worker was started: then the configuration is at fault.
    """
    if event.id == "on_chip_memory":
        return "not_device_memory"
    if event.id == "workspace_overflow":
        return "workspace"
    if event.rule.kind == "config":
        return "config_error"
    said, words = _said(event)
    name, text = said or "", words or ""
    if name == "AcceleratorError" or _DEVICE.search(text):
        return "cuda_error"
    if name == "DistBackendError" or _LIBRARY.search(text[:120]):
        return "library_error"
    if name in _CONFIG_TYPES or (before_engine and name in {"ValueError", "OSError", "AssertionError", "KeyError"}):
        return "config_error"
    return "exception"


class RootCause:
    """The exceptions of a server's processes until it dies: which one was the cause.

    A worker's exception explains the engine's, the engine's the front end's. Of one process the first traceback counts,
    with what the same record says later of it (`During handling of the above exception ...`).
    """

    def __init__(self) -> None:
        self._found: dict[object, list[Any]] = {}
        self._latest: object = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(self, event: Event, process: object, level: int, phase: str, *, before_engine: bool = False) -> None:
        """One exception that may be the cause; `level` is smaller the closer the process is to the device."""
        if is_wrapper(event):
            return
        earlier = self._found.get(process)
        if earlier is not None and (earlier[1].prefix.time != event.prefix.time or earlier[1].message == event.message):
            return
        self._found[process] = [level, event, phase if earlier is None else earlier[2], before_engine, None]
        self._latest = process

    def detail(self, event: Event) -> None:
        """The line after a validation error that says what it is about."""
        found = self._found.get(self._latest)
        if found is not None and found[4] is None and 0 < event.line - found[1].line <= 3:
            found[4] = event

    def forget(self, process: object | None = None) -> None:
        """A process went on (None: the server did): what it said was no end."""
        if process is None:
            self._found.clear()
        else:
            self._found.pop(process, None)

    def failure(self) -> Failure | None:
        """The cause."""
        if not self._found:
            return None
        _, event, phase, before, detail = min(self._found.values(), key=lambda f: (f[0], f[1].input, f[1].line))
        return failure_of(event, phase, before_engine=before, detail=detail)


def failure_of(event: Event, phase: str, *, before_engine: bool = False, detail: Event | None = None) -> Failure:
    """The failure that the last line of a traceback reports; `detail` is the line of a validation error after it."""
    numbers: dict[str, Any] = {}
    name, text = _said(event)
    if detail is not None and detail.word("text") is not None:
        text = detail.word("text")
    if name is not None:
        numbers["exception"] = name
    if text is not None:
        numbers["cause"] = clean(text.strip())[:LONGEST_CAUSE]
    evidence = (event.evidence,) if detail is None else (event.evidence, detail.evidence)
    return Failure(kind_of(event, before_engine=before_engine), phase, numbers, evidence)
