"""Where bytes come from: files (compressed or not), standard input, pipes, a file that grows.

    with open_input("server.log.gz") as source:
        for block in source.blocks():
            ...

Blocks are UTF-8 whatever the input's encoding; memory does not grow with the input. What was odd about an input stands
in `notes` once it has been read; what can't be read at all is an `InputError`.
"""

from __future__ import annotations

from memledger.sources.inputs import BLOCK_BYTES, HEAD_BYTES, InputError, Kind, OpenInput, Progress, open_input

__all__ = ["BLOCK_BYTES", "HEAD_BYTES", "InputError", "Kind", "OpenInput", "Progress", "open_input"]
