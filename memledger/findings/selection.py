"""Which findings are wanted: `--select` and `--ignore` by code or prefix; of two that match, the longer one decides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from memledger.findings.catalogue import matching
from memledger.ledger import Report


class Selection(msgspec.Struct, frozen=True):
    """Prefixes of codes; nothing selected means all."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """Whether a finding of that code is wanted."""
        chosen = max((len(p) for p in self.select if code.startswith(p)), default=0)
        ignored = max((len(p) for p in self.ignore if code.startswith(p)), default=0)
        if self.select and not chosen:
            return False
        return ignored == 0 or chosen > ignored

    def apply(self, report: Report) -> Report:
        """The report with the wanted findings only."""
        if not self.select and not self.ignore:
            return report
        servers = tuple(
            msgspec.structs.replace(s, findings=tuple(f for f in s.findings if self.wants(f.code)))
            for s in report.servers
        )
        return msgspec.structs.replace(report, servers=servers)


def parse_codes(values: Iterable[str]) -> tuple[str, ...]:
    """Codes and prefixes from comma lists: `ML1,ML501`.

    Raises:
        ValueError: one of them is no code of a finding, nor the beginning of one.
    """
    codes: Sequence[str] = [code.strip().upper() for value in values for code in value.split(",") if code.strip()]
    for code in codes:
        if not re.fullmatch(r"ML\d{0,3}", code) or not matching(code):
            raise ValueError(f"{code!r} is no finding's code (ML101) or group (ML1); `memledger finding` lists them")
    return tuple(dict.fromkeys(codes))
