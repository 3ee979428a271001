"""Amounts of memory: whole bytes with a tolerance, read from printed figures.

Engines print binary units under decimal names: SGLang's "GB" and vLLM's "GB" and "GiB" are all 2**30 bytes (shared facts
in docs/ledger.md). Each rule in `parsers/` therefore states the unit of every field; nothing is guessed from the word
in the line.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import msgspec

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

UNIT_BYTES: Final[dict[str, int]] = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 2**40,
    "kB10": 10**3,
    "MB10": 10**6,
    "GB10": 10**9,
}

NOT_AVAILABLE_FROM: Final = 2**63
"""Drivers and torch print all-ones (2**64 - 1 bytes, `17179869184.00 GiB`) for "not available": at or above this, no figure."""


class Amount(msgspec.Struct, frozen=True):
    """Bytes, known to within `tolerance` bytes either way. Sums and differences add tolerances."""

    bytes: int
    tolerance: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.bytes + other.bytes, self.tolerance + other.tolerance)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.bytes - other.bytes, self.tolerance + other.tolerance)

    def __neg__(self) -> Amount:
        return Amount(-self.bytes, self.tolerance)

    def scaled(self, factor: int) -> Amount:
        """This amount `factor` times."""
        return Amount(self.bytes * factor, self.tolerance * abs(factor))

    def is_zero(self) -> bool:
        """Whether zero lies within the tolerance."""
        return abs(self.bytes) <= self.tolerance


ZERO: Final = Amount(0, 0)


def total(amounts: list[Amount] | tuple[Amount, ...]) -> Amount:
    """The sum of `amounts`; `ZERO` for none."""
    return Amount(sum(a.bytes for a in amounts), sum(a.tolerance for a in amounts))


def parse_amount(text: str, unit: str) -> Amount | None:
    """The amount that a printed number stands for.

    `unit` is a key of `UNIT_BYTES`, optionally followed by `.N`: the program rounds to N decimals and then drops
    trailing zeros (Python's `round`), so that `76.4` under `GiB.2` is 76.40 +- 0.005. Without `.N` the number of
    printed decimals gives the tolerance: half of the last digit. Whole bytes are exact.

    Returns None where the figure is a driver's "not available" (at or above 2**63 bytes).

    Raises:
        ValueError: `text` is not a decimal number.
        KeyError: `unit` is not known.
    """
    name, _, decimals = unit.partition(".")
    factor = UNIT_BYTES[name]
    try:
        value = Decimal(text.replace(",", ""))
    except ArithmeticError as error:
        raise ValueError(f"not a number: {text!r}") from error
    if not value.is_finite():
        raise ValueError(f"not a finite number: {text!r}")
    size = int((value * factor).to_integral_value())
    if abs(size) >= NOT_AVAILABLE_FROM:
        return None
    exponent = value.as_tuple().exponent
    shown = max(0, -exponent) if isinstance(exponent, int) else 0
    digits = max(shown, int(decimals or 0))
    if factor == 1 and digits == 0:
        return Amount(size, 0)
    half = Decimal(factor) * Decimal(1).scaleb(-digits) / 2
    return Amount(size, int(half.to_integral_value(rounding="ROUND_CEILING")))
