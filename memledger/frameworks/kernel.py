"""What the kernel's out-of-memory killer says of a server: whether the process it ended is one of the server's."""

from __future__ import annotations

import re
from typing import Final

from memledger.events import Event

_OF_A_SERVER: Final = re.compile(
    r"python|pt_main_thread|VLLM|vllm|sglang|ray::|ray_|uvicorn|EngineCore|Worker|APIServer|cuda-|torchrun|mpirun|launch"
)
"""Names of processes (15 characters are left of them) that a server is made of."""


def is_of_a_server(name: str | None) -> bool:
    """Whether a process of this name may be a server's; a name that is not known may be."""
    return name is None or _OF_A_SERVER.match(name.strip()) is not None


def kind_of_kill(event: Event) -> str | None:
    """`host_memory` where a process of a server was killed, `other_process_killed` for another; None for other lines."""
    if event.id not in {"killed_process", "oom_kill"}:
        return None
    return "host_memory" if is_of_a_server(event.word("name")) else "other_process_killed"
