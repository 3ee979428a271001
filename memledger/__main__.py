"""`python -m memledger` and the `memledger` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from memledger import __version__

        print(f"memledger {__version__}")
        return
    if sys.argv[1:] in (["--help"], ["-h"]):
        from memledger.cli.overview import help_text

        print(help_text())
        return
    from memledger.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
