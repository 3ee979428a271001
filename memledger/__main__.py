"""`python -m memledger` and the `memledger` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from memledger import __version__

        _print(f"memledger {__version__}")
        return
    if sys.argv[1:] in (["--help"], ["-h"]):
        from memledger.cli.overview import help_text

        _print(help_text())
        return
    from memledger.cli.app import run

    sys.exit(run())


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # What is still buffered must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            from memledger.cli.app import say

            say(f"memledger: it can't be written: {error.strerror}.")
            sys.exit(74)


if __name__ == "__main__":
    main()
