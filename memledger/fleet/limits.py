"""What one file may take: time and memory, kept by the process that reads it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

GRACE_SECONDS: Final = 5.0
"""A process that does not come back from a call into a library is ended so long after its file's time was up."""


class TimeLimitError(BaseException):
    """The file's time is up. No `Exception`: nothing that handles a bad line may take it for one."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """At most `seconds` for what is inside, where this is the main thread of a process.

    First an alarm, which ends Python code; where that does not come through (a call into a library that hangs), the process ends itself.

    Raises:
        TimeLimitError: the time is up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, __: FrameType | None) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, ring)
    with Path(os.devnull).open("wb") as nowhere:
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=nowhere)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, before)


def limit_memory(size: int) -> None:
    """Allow this process `size` bytes of private memory beyond what it has now; more is a `MemoryError`, not the machine's trouble.

    RLIMIT_DATA counts private writable memory (Linux 4.7 and later, man 2 getrlimit); mapped files and libraries are not counted.
    """
    data = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        if line.startswith("VmData:")
    )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data + size
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
