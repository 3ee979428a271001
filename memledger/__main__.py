"""`python -m memledger` and the `memledger` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    from memledger.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
