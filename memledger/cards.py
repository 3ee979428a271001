"""How much memory a card shows to CUDA or HIP, by its name: for `--gpu-total h100`, where a log prints no total.

CUDA's total (`cudaMemGetInfo`, what torch and vLLM print) is 1 to 4 % below the advertised size and below NVML's total,
and moves by some tenths of a GiB with the driver and with ECC; each row therefore has a tolerance that covers it.
"""

from __future__ import annotations

import difflib
import re
from typing import Final, Literal

import msgspec

from memledger.units import GIB, MIB, Amount

SEEN: Final = "printed by torch or vLLM in public logs"
NVML_LESS: Final = "NVML's total in public nvidia-smi output, less 0.2 to 3.5 % that the driver keeps"


class Card(msgspec.Struct, frozen=True):
    """One kind of card: what CUDA (HIP) shows of it, in GiB, either way by `tolerance_gib`; `source` says how that is known."""

    name: str
    total_gib: float
    tolerance_gib: float
    source: str
    aliases: tuple[str, ...] = ()
    unified: bool = False
    """Device memory is the system's: free memory then moves with the page cache and every other program."""

    @property
    def total(self) -> Amount:
        """The total with its tolerance."""
        return Amount(round(self.total_gib * GIB), round(self.tolerance_gib * GIB))


CARDS: Final = (
    Card("B300", 267.7, 2.0, SEEN, ("gb300",)),
    Card("B200", 178.35, 0.6, SEEN, ("b200-180gb",)),
    Card("GB200", 184.3, 1.5, NVML_LESS),
    Card("H200", 139.8, 0.3, SEEN, ("h200-141gb", "h200-nvl", "h20-141gb", "h20-3e")),
    Card("H100", 79.2, 0.3, SEEN, ("h100-80gb", "h100-80", "h800", "h100-sxm", "h100-pcie")),
    Card("H100 NVL", 93.1, 0.5, NVML_LESS, ("h100-94gb", "h100-94")),
    Card("GH200", 95.0, 0.6, SEEN, ("gh200-96gb", "gh200-96", "gh200-480gb")),
    Card("GH200 144 GB", 139.9, 2.5, NVML_LESS, ("gh200-144gb", "gh200-144", "gh200-144g")),
    Card("H20", 95.1, 0.3, SEEN, ("h20-96gb", "h20-96")),
    Card("A100 80 GB", 79.25, 0.15, SEEN, ("a100-80", "a800", "a800-80gb", "a100-80gb")),
    Card("A100 40 GB", 39.45, 0.2, NVML_LESS, ("a100-40", "a100-40gb")),
    Card("A40", 44.4, 0.2, SEEN, ("l40", "l40s")),
    Card("A30", 23.6, 0.2, NVML_LESS, ("a30-24gb",)),
    Card("A10", 22.05, 0.2, SEEN, ("a10g", "l4")),
    Card("T4", 14.65, 0.2, NVML_LESS),
    Card("V100 16 GB", 15.77, 0.1, SEEN, ("v100", "v100-16gb", "v100-16")),
    Card("V100 32 GB", 31.74, 0.1, SEEN, ("v100-32gb", "v100-32")),
    Card("RTX PRO 6000 Blackwell", 95.0, 0.7, SEEN, ("rtx-pro-6000", "pro-6000", "rtxpro6000", "pro6000")),
    Card("RTX 6000 Ada", 47.4, 0.2, SEEN, ("rtx-6000-ada", "6000-ada", "rtx-a6000", "a6000")),
    Card("RTX 5090", 31.38, 0.2, SEEN, ("5090", "rtx5090")),
    Card("RTX 4090", 23.55, 0.15, SEEN, ("4090", "rtx4090")),
    Card("RTX 3090", 23.6, 0.15, SEEN, ("3090", "rtx3090", "3090ti", "rtx-3090-ti")),
    Card("RTX 5080", 15.47, 0.2, SEEN, ("5080", "rtx5080")),
    Card(
        "GB10",
        120.5,
        2.0,
        "operating system's total on DGX Spark (unified memory), public logs",
        ("dgx-spark", "spark"),
        unified=True,
    ),
    Card("MI300X", 191.7, 0.4, NVML_LESS, ("mi300",)),
    Card("MI325X", 255.7, 0.5, NVML_LESS, ("mi325",)),
    Card("MI355X", 287.98, 0.4, SEEN, ("mi350x", "mi350", "mi355")),
    Card("MI250X (one die)", 63.98, 0.3, NVML_LESS, ("mi250", "mi250x", "mi210")),
)

_VARIANT: Final = re.compile(
    r"(?i)\b(?:hbm\de?|sxm\d?(?: ac)?|pcie|oam|tensor core|tesla|generation|(?:max q )?(?:server|workstation) edition)\b"
)
"""Words of a device's name that say nothing of its memory: board forms and series."""
_SIZE: Final = re.compile(r"(?i)^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b?|bytes?|b)?\s*$")
_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "m": MIB, "g": GIB, "t": 2**40}


class Total(msgspec.Struct, frozen=True):
    """A device's total as given on the command line: a size (`derived`, exact) or a card (`assumed`, with a tolerance)."""

    amount: Amount
    basis: Literal["derived", "assumed"]
    label: str | None = None


def parse_total(text: str) -> Total:
    """A size (`80GiB`, `81559MiB`, `85899345920`) or a card's name (`h100`, `4090`, `NVIDIA H100 80GB HBM3`).

    `GB` and `GiB` are both 2**30 bytes here, as the engines print them.

    Raises:
        ValueError: neither; the message says what would do.
    """
    size = _SIZE.match(text)
    if size is not None and (size["unit"] or float(size["number"]) >= GIB):
        number, unit = float(size["number"]), (size["unit"] or "").lower()
        value = round(number * _UNITS[unit[:1] if unit else ""])
        if value < 2**20:
            raise ValueError(f"{text!r} is too small for a GPU's memory; give a size such as 80GiB or 81559MiB")
        return Total(Amount(value), "derived")
    by_name = {key: card for card in CARDS for key in map(_key, (card.name, *card.aliases))}
    card = by_name.get(_key(text)) or by_name.get(_key(card_named(text) or ""))
    if card is not None:
        return Total(card.total, "assumed", card.name)
    if _key(text) == "a100":
        raise ValueError("there are two A100s: a100-40gb and a100-80gb")
    names = [alias for card in CARDS for alias in (card.name.lower().replace(" ", "-"), *card.aliases)]
    near = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(
        f"no card {text!r}: {hint}A size always works: 80GiB, 81559MiB (nvidia-smi's total is a little more than CUDA's)"
    )


def card_named(device: str) -> str | None:
    """What to give `parse_total` for a device name as drivers print it (`NVIDIA H100 80GB HBM3`); None where unknown."""
    key = _key(_VARIANT.sub("", device.replace("_", " ").replace("-", " ")))
    for card in CARDS:
        names = (card.name, *card.aliases)
        if key in map(_key, names):
            return (card.aliases or (card.name,))[0]
    return None


def unified_total(size: int) -> bool:
    """Whether a total that CUDA printed is that of a card with unified memory, and of no other card."""
    near = {card.unified for card in CARDS if abs(card.total.bytes - size) <= card.total.tolerance}
    return near == {True}


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|amd|instinct|[^a-z0-9]", "", name.lower())
