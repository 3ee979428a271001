"""Conclusions from a ledger: each finding is a pure function of one `Server`, with a stable code.

ML1xx recurrent state, ML2xx failures, ML3xx the balance, ML4xx host memory.
"""

from __future__ import annotations

import msgspec

from memledger.findings.balance import in_use_at_start, over_counted, unexplained
from memledger.findings.failures import failure_summary
from memledger.findings.host import host_memory
from memledger.findings.state import capped_by_slots, idle_slots, slots_are_the_ceiling
from memledger.ledger import Finding, Report, Server

_FAMILIES = (
    failure_summary,
    idle_slots,
    slots_are_the_ceiling,
    capped_by_slots,
    unexplained,
    over_counted,
    in_use_at_start,
    host_memory,
)


def find(server: Server) -> tuple[Finding, ...]:
    """Every finding that holds for a server, in order of code."""
    found = [finding for family in _FAMILIES if (finding := family(server)) is not None]
    return tuple(sorted(found, key=lambda f: f.code))


def attach(report: Report) -> Report:
    """The report with the findings of each of its servers (in place of any it had)."""
    servers = tuple(msgspec.structs.replace(server, findings=find(server)) for server in report.servers)
    return msgspec.structs.replace(report, servers=servers)
