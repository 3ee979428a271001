"""Rules are data: they are checked when loaded, and their samples are checked by running them."""

import pytest

from memledger.grammar import GrammarError, RuleSet, convert, load_rules, match_rule, read_rule_file
from memledger.scan import check_rules
from memledger.units import GIB, Amount

RULE = """
framework = "sglang"
[[rule]]
id = "kv"
anchor = "KV Cache is allocated."
pattern = '''KV Cache is allocated\\. #tokens: (?<tokens>[\\d,]+), K size: (?<k>[\\d.]+) ?GB'''
fields = { tokens = "count", k = "GiB" }
means = "one pool"
[[rule.sample]]
line = "[2026-09-09 11:57:18 TP0] KV Cache is allocated. #tokens: 2618868, K size: 19.98 GB"
expect = { tokens = 2618868, k = 19.98 }
"""


def write(tmp_path, text, name="mine.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_bundled_rules_take_every_one_of_their_samples():
    assert check_rules(load_rules()) == []


def test_no_rule_is_without_a_sample_or_a_meaning():
    assert [r.full_id for r in load_rules().rules if not r.sample or not r.means] == []


def test_a_users_rule_file_comes_before_the_bundled_ones(tmp_path):
    rules = load_rules([write(tmp_path, RULE.replace('id = "kv"', 'id = "my_kv"'))])
    assert rules.rules[0].full_id == "sglang.my_kv"


def test_a_sample_with_another_value_is_reported(tmp_path):
    wrong = RULE.replace("k = 19.98 }", "k = 19.99 }")
    problems = check_rules(RuleSet(read_rule_file(write(tmp_path, wrong)).rule))
    assert len(problems) == 1
    assert "expected 19.99" in problems[0]


def test_a_sample_that_is_not_taken_is_reported(tmp_path):
    wrong = RULE.replace("TP0] KV Cache", "TP0] A KV Cache")
    assert "not recognised" in check_rules(RuleSet(read_rule_file(write(tmp_path, wrong)).rule))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('k = "GiB"', 'k = "Gigs"'), "unknown field type 'Gigs'"),
        (('anchor = "KV Cache is allocated."', ""), "needs an anchor"),
        (('means = "one pool"', ""), "means"),
        (('framework = "sglang"', 'framework = "sglang"\ncode = "import os"'), "code"),
        (("[[rule]]", "[[rule"), "mine.toml"),
    ],
)
def test_a_rule_file_that_cannot_work_is_refused_with_its_name(tmp_path, change, message):
    with pytest.raises(GrammarError, match=r"mine\.toml") as error:
        read_rule_file(write(tmp_path, RULE.replace(*change, 1)))
    assert message in str(error.value)


def test_a_missing_rule_file_is_one_sentence(tmp_path):
    with pytest.raises(GrammarError, match="No such file"):
        read_rule_file(tmp_path / "none.toml")


def test_two_rules_of_one_name_are_refused(tmp_path):
    rule = read_rule_file(write(tmp_path, RULE)).rule[0]
    with pytest.raises(GrammarError, match="defined twice"):
        RuleSet([rule, rule])


def test_fields_are_typed_and_absent_groups_are_absent(tmp_path):
    rule = read_rule_file(
        write(
            tmp_path,
            RULE.replace(" ?GB'''", " ?GB(?:, V size: (?<v>[\\d.]+) ?GB)?'''").replace(
                'k = "GiB" }', 'k = "GiB", v = "GiB" }', 1
            ),
        )
    ).rule[0]
    got = match_rule(rule, "KV Cache is allocated. #tokens: 2,618,868, K size: 19.98 GB")
    assert got["tokens"] == 2618868
    assert abs(got["k"].bytes - 19.98 * GIB) < 1
    assert "v" not in got


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1,234", "count", 1234),
        ("12.5", "percent", 0.125),
        ("True", "flag", True),
        ("786.00 MiB", "size", Amount(786 * 2**20, 5243)),
        ("17179869184.00 GiB", "size", None),
    ],
)
def test_printed_text_becomes_a_typed_value(text, kind, value):
    assert convert(text, kind) == value


FORK = """
framework = "sglang"
[[rule]]
id = "kv_pool"
anchor = "Key-value store ready"
pattern = '''Key-value store ready: (?<tokens>\\d+) tokens, keys (?<k>[\\d.]+) GiB, values (?<v>[\\d.]+) GiB'''
fields = { tokens = "count", k = "GiB", v = "GiB" }
means = "a fork's wording of the KV pool"
[[rule.sample]]
line = "[2026-09-09 11:57:18] Key-value store ready: 330323 tokens, keys 10.08 GiB, values 10.08 GiB"
expect = { tokens = 330323, k = 10.08, v = 10.08 }
"""


def test_a_users_wording_of_a_known_line_enters_the_ledger_like_the_bundled_one(tmp_path):
    from pathlib import Path

    from memledger.pipeline import explain

    demo = Path(__file__).parent.parent / "fixtures" / "demo" / "server.log"
    text = demo.read_text(encoding="utf-8")
    (line,) = [one for one in text.splitlines() if "KV Cache is allocated" in one]
    stamp = line.split("]")[0] + "]"
    log = write(
        tmp_path,
        text.replace(line, f"{stamp} Key-value store ready: 330323 tokens, keys 10.08 GiB, values 10.08 GiB"),
        "fork.log",
    )
    rules = load_rules([write(tmp_path, FORK)])
    assert check_rules(rules) == []
    (usual,), (fork,) = explain([str(demo)]).servers, explain([str(log)], rules).servers
    assert [(e.account, e.bytes) for e in fork.ranks[0].entries] == [
        (e.account, e.bytes) for e in usual.ranks[0].entries
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('k = "GiB"', 'keys = "GiB"'), "has no field 'keys'"),
        (('tokens = "count"', 'tokens = "GiB"'), "field tokens is 'count'"),
    ],
)
def test_a_users_wording_must_give_the_fields_of_its_meaning(tmp_path, change, message):
    with pytest.raises(GrammarError) as error:
        load_rules([write(tmp_path, FORK.replace(*change, 1))])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RULE.replace('framework = "sglang"', 'framework = "other"'), "unknown framework 'other'"),
        (RULE.replace("pattern = '''", "pattern = '''(("), "no regular expression"),
        (RULE.replace("(?<k>", "(?<key>"), "no group 'k'"),
        (RULE.replace('k = "GiB"', 'k = "GiB.99999999"'), "unknown field type"),
        ('framework = "sglang"\nx = ' + "[" * 50_000, "nested too deep"),
    ],
)
def test_a_users_rule_that_can_take_no_line_is_refused(tmp_path, rule, message):
    with pytest.raises(GrammarError) as error:
        load_rules([write(tmp_path, rule)])
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["float", "percent"])
def test_a_number_with_more_digits_than_any_figure_is_none(kind):
    with pytest.raises(ValueError, match="finite"):
        convert("9" * 400, kind)
