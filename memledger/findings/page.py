"""The page of one code: what it says, when it holds, when it is silent, what to do."""

from __future__ import annotations

import msgspec


class Page(msgspec.Struct, frozen=True):
    """One code: `says` in a sentence or two with the arithmetic, `holds` the rule, `silent` where it says nothing, `then` what to do."""

    code: str
    title: str
    severity: str
    says: str
    holds: str
    silent: str
    then: str
