"""`python -m memledger` and the `memledger` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    from memledger.pipeline import explain, to_json

    report = explain([a for a in sys.argv[2:] if a.endswith(".log")])
    sys.stdout.buffer.write(to_json(report))
    sys.exit(0 if report.servers else 3)


if __name__ == "__main__":
    main()
