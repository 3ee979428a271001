"""`--gpu-total`: a size is exact, a card's name is an assumption with a tolerance, anything else is explained."""

import pytest

from memledger.cards import CARDS, card_named, parse_total, unified_total
from memledger.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("80 GiB", 80 * GIB),
        ("80G", 80 * GIB),
        ("80gb", 80 * GIB),
        ("23.5GiB", round(23.5 * GIB)),
        ("81559MiB", 81559 * MIB),
        ("85899345920", 80 * GIB),
        ("85899345920B", 80 * GIB),
    ],
)
def test_a_size_is_exact(text, size):
    total = parse_total(text)
    assert (total.amount.bytes, total.amount.tolerance, total.basis, total.label) == (size, 0, "derived", None)


@pytest.mark.parametrize(
    ("text", "name", "printed"),
    [
        ("h100", "H100", 79.18),
        ("NVIDIA H100 80GB", "H100", 79.11),
        ("H200", "H200", 139.81),
        ("a100-80gb", "A100 80 GB", 79.25),
        ("4090", "RTX 4090", 23.52),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 23.56),
        ("5090", "RTX 5090", 31.4),
        ("rtx-pro-6000", "RTX PRO 6000 Blackwell", 95.59),
        ("B200", "B200", 178.35),
        ("b300", "B300", 267.69),
        ("GH200", "GH200", 95.0),
        ("h20", "H20", 95.07),
        ("L4", "A10", 22.05),
        ("l40s", "A40", 44.4),
        ("V100", "V100 16 GB", 15.77),
        ("mi355x", "MI355X", 287.98),
        ("MI300X", "MI300X", 191.7),
        ("gb10", "GB10", 121.63),
        ("NVIDIA H100 80GB HBM3", "H100", 79.18),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB", 79.25),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell", 94.97),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 47.4),
        ("Tesla V100-SXM2-32GB", "V100 32 GB", 31.74),
        ("NVIDIA GH200 480GB", "GH200", 95.0),
        ("AMD Instinct MI300X OAM", "MI300X", 191.7),
    ],
)
def test_a_card_covers_the_totals_that_engines_print_of_it(text, name, printed):
    total = parse_total(text)
    assert (total.basis, total.label) == ("assumed", name)
    assert abs(total.amount.bytes - printed * GIB) <= total.amount.tolerance


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1000", "did you mean"),
        ("a100", "a100-40gb and a100-80gb"),
        ("80", "A size always works"),
        ("", "no card"),
        ("1KiB", "too small"),
        ("-5GiB", "no card"),
    ],
)
def test_anything_else_is_explained(text, said):
    with pytest.raises(ValueError, match=said):
        parse_total(text)


def test_no_name_means_two_cards():
    names = [key.lower().replace(" ", "-") for card in CARDS for key in (card.name, *card.aliases)]
    owners = {}
    for card in CARDS:
        for key in (card.name, *card.aliases):
            owners.setdefault(key.lower().replace(" ", "").replace("-", ""), set()).add(card.name)
    assert len(names) > 60
    assert {key: cards for key, cards in owners.items() if len(cards) > 1} == {}


def test_every_card_says_how_it_is_known_and_how_well():
    assert all(card.source and 0 < card.tolerance_gib < 0.05 * card.total_gib for card in CARDS)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA_H100_80GB_HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Some Unknown Accelerator", None),
    ],
)
def test_a_device_name_as_drivers_print_it_leads_to_its_card(device, card):
    assert card_named(device) == card
    assert card is None or parse_total(card).label is not None


def test_a_total_says_unified_memory_only_where_no_other_card_has_it():
    assert unified_total(122_501 * MIB)
    assert not unified_total(81_559 * MIB)
    assert not unified_total(95 * GIB)
    assert not unified_total(1 * GIB)
