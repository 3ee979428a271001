"""Comparisons: steps that sum and change sign with the sides, figures turned into one measure, what is not told said."""

import json
from fractions import Fraction
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_reports import at, gib, hybrid, hybrid_rank, rank

from memledger import modelled, pipeline
from memledger.compare import differences, expect, meaning, values
from memledger.compare.load import NotAReportError, load_input, read_json
from memledger.compare.pair import Entrant, compare, sweep
from memledger.compare.side import choose_rank, choose_server, side_of
from memledger.grammar import load_rules
from memledger.ledger import Budget, Capacity, Concurrency, Gpu, Rank, Report, Server, close, entry
from memledger.live import snapshot
from memledger.live.sample import Sample
from memledger.report import compare_json, compare_markdown, compare_text
from memledger.report.json import encode
from memledger.report.text import Style
from memledger.units import GIB, Amount

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
SCHEMA_FILE = ROOT / "docs" / "schema" / "compare.schema.json"
ALL_CASES = sorted(path.name for path in FIXTURES.glob("compare-*"))
CASES = [name for name in ALL_CASES if name != "compare-failed"]


def report_of(path):
    report = pipeline.explain([str(path)])
    return modelled.split(modelled.checked(report, modelled.architectures(report, None, look_here=False)))


def entrant(report, label="A", path="a.log"):
    start, server = choose_server(report, None)
    return Entrant(label, 0, path, start + 1, server)


def of_server(server, label="A"):
    return Entrant(label, 0, f"{label.lower()}.log", 1, server)


@pytest.fixture(scope="module")
def logs():
    return {
        case: tuple(
            entrant(report_of(FIXTURES / case / f"{name}.log"), name.upper(), f"{name}.log") for name in ("a", "b")
        )
        for case in ALL_CASES
    }


def compared(logs, case):
    return compare(*logs[case])


def step(found, name):
    return next((s for s in found.steps if s.name == name), None)


def largest(found):
    return max(found.steps, key=lambda s: (abs(s.kv_tokens or 0), abs(s.bytes))).name


def assert_sums(found):
    pools, tokens = found.capacity.pool_bytes, found.capacity.kv_tokens
    assert sum(s.bytes for s in found.steps) == pools.b - pools.a
    if all(s.kv_tokens is not None for s in found.steps):
        assert sum(s.kv_tokens for s in found.steps) == tokens.b - tokens.a
    names = [s.name for s in found.steps]
    assert names == [name for name in values.STEPS if name in names], "the order is fixed"
    assert names[-1] == "unexplained"


def assert_mirrored(found, back):
    assert [(s.name, -s.bytes, None if s.kv_tokens is None else -s.kv_tokens) for s in found.steps] == [
        (s.name, s.bytes, s.kv_tokens) for s in back.steps
    ]
    assert found.interaction_tokens == back.interaction_tokens


# The golden reports of the fixtures


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_report_of_a_pair_is_the_golden_one(case, logs, update_golden):
    found = compared(logs, case)
    text = compare_text.render(values.CompareReport("0.1.0", (), (), found), Style(80))
    golden = FIXTURES / case / "report.txt"
    if update_golden:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "pytest --update-golden writes it anew"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("case", CASES)
def test_steps_sum_exactly_and_change_sign_with_the_sides(case, logs):
    first, second = logs[case]
    found = compare(first, second)
    assert_sums(found)
    assert_mirrored(found, compare(second, first))


@pytest.mark.parametrize("case", CASES)
def test_a_log_against_itself_has_no_step(case, logs):
    for one in logs[case]:
        found = compare(one, one)
        assert all(s.bytes == 0 and not s.kv_tokens for s in found.steps)
        assert found.interaction_tokens == 0
        assert not [d for d in found.differences if d.status == "differs"]
        assert found.cause[-1] == "Nothing that decides the KV pool differs."


@pytest.mark.parametrize("case", CASES)
def test_where_both_ledgers_close_the_unexplained_is_within_its_tolerance_and_one_percent_of_the_device(case, logs):
    found = compared(logs, case)
    openings = [r.residual.opening_bytes or 0 for one in logs[case] for r in one.server.ranks]
    if found.a.verdict == found.b.verdict == "closed":
        last = found.steps[-1]
        assert abs(last.bytes) <= last.tolerance_bytes + max(openings) // 100


@pytest.mark.parametrize(
    ("case", "name", "gib_moved"),
    [
        ("compare-engines", "recurrent_state", 17.92),
        ("compare-state-slots", "recurrent_state", 14.91),
        ("compare-capped", "left_in_budget", -29.64),
        ("compare-kv-dtype", "kv_bytes_per_token", 0.0),
        ("compare-draft", "draft", -4.21),
        ("compare-window", "window_pool", 8.70),
        ("compare-card", "device_total", 55.16),
        ("compare-weights", "weights", 6.50),
        ("compare-given", "budget_rule", -35.58),
        ("compare-short-logs", "not_in_the_logs", 8.35),
        ("compare-token-rule", "rounding_and_groups", 0.0),
        ("compare-in-use", "free_before_loading", -16.16),
        ("compare-fraction", "budget_rule", -14.13),
        ("compare-graph-estimate", "cuda_graphs", -4.58),
        ("compare-batched-tokens", "activations", -6.64),
        ("compare-multimodal", "other", -3.5),
    ],
)
def test_each_fixture_is_explained_by_what_was_changed_in_it(case, name, gib_moved, logs):
    found = compared(logs, case)
    assert largest(found) == name
    assert step(found, name).bytes / GIB == pytest.approx(gib_moved, abs=0.011)


# The public questions


def test_two_short_logs_give_bytes_per_token_and_say_what_they_cannot_tell(logs):
    found = compared(logs, "compare-short-logs")
    a, b = found.meanings
    assert (a.kv_bytes_per_token, b.kv_bytes_per_token) == (48681, 48104)
    assert 0 < a.kv_bytes_per_token_tolerance <= 33
    assert 0 < b.kv_bytes_per_token_tolerance <= 34
    assert a.model_bytes_per_token == b.model_bytes_per_token == 48128
    assert any("upper bound" in note for note in a.notes)
    assert not b.notes
    last = found.steps[-1]
    assert last.bytes == 0
    assert abs(last.kv_tokens) > last.tolerance_tokens
    assert "1.2 % stays unexplained" in found.cause[-1]
    assert "8.11 against 16.46 GiB" in found.cause[0]
    assert found.cause[1].startswith("The pool's size makes the difference: +8.35 GiB")
    assert {item.name for item in found.not_in_logs} == {"budget_rule", "weights", "activations", "cuda_graphs"}
    fractions = next(d for d in found.differences if d.name == "memory_fraction")
    assert (fractions.a, fractions.b) == ("0.9 of the device's total", "0.93 of the memory free before loading")


def test_a_changed_rule_of_the_printed_figure_is_not_memory(logs):
    found = compared(logs, "compare-token-rule")
    a, b = found.meanings
    assert a.pool_bytes == b.pool_bytes
    assert (a.rule, b.rule) == ("blocks_per_group", "effective")
    changed = step(found, "rounding_and_groups")
    assert abs(changed.kv_tokens - (b.printed_tokens - a.printed_tokens)) < 0.005 * b.printed_tokens
    assert all(s.bytes == 0 for s in found.steps)
    assert "not memory" in found.cause[1]


def test_requests_at_another_context_come_from_the_model(logs):
    a = compare(*logs["compare-token-rule"], 32768).meanings[0]
    # 1,037 blocks; a request of 32,768 tokens takes ceil(32768 / 784) = 42 blocks and 6 of state.
    assert a.fits.by_kv == pytest.approx(1037 / 48, abs=0.02)
    assert a.fits.bound_by == "KV pool"


def test_the_two_engines_count_draft_tokens_alike():
    sglang = side_of(hybrid(config={"speculative_draft_tokens": 16}), Rank())
    vllm = side_of(Server("vllm", config={"speculative_draft_tokens": 15}), Rank())
    assert differences.verified_tokens(sglang) == differences.verified_tokens(vllm) == 16


def test_a_state_checkpoint_costs_a_slot_or_a_block_of_each_group(logs):
    a, b = compared(logs, "compare-engines").hybrid.states
    assert a.bytes_per_checkpoint == a.bytes_per_slot
    assert a.bytes_per_request == 5 * a.bytes_per_slot
    assert b.bytes_per_checkpoint == 3 * 49 * 2**20
    assert b.bytes_per_request == 2 * b.bytes_per_checkpoint


def test_a_backend_that_is_not_in_the_log_is_not_filled_in(logs):
    rows = {(r.layer, r.phase): r for r in compared(logs, "compare-engines").hybrid.backends}
    assert rows["linear attention", "decode"].a == "triton"
    assert rows["linear attention", "decode"].b is None
    assert (rows["full attention", "prefill"].b, rows["full attention", "prefill"].b_raw) == ("fa3", "FLASH_ATTN")


def test_what_one_side_does_not_tell_is_unknown_not_default(logs):
    found = compared(logs, "compare-engines")
    decode = next(d for d in found.differences if d.name == "linear_attention_backend_decode")
    assert (decode.status, decode.b) == ("unknown", None)
    assert next(d for d in found.differences if d.name == "kv_cache_dtype").status == "unknown"


# Inputs


@pytest.mark.parametrize("case", CASES)
def test_a_json_report_compares_like_its_log(case, logs, tmp_path):
    rules = load_rules()
    decoded = []
    for label, one in zip("AB", logs[case], strict=True):
        file = tmp_path / f"{label}.json"
        file.write_bytes(encode(report_of(FIXTURES / case / one.path)))
        loaded = load_input(str(file), rules)
        assert loaded.decoded
        decoded.append(entrant(loaded.report, label, one.path))
    got, expected = compare(*decoded), compared(logs, case)
    assert msgspec.to_builtins(got) == msgspec.to_builtins(expected)


def test_json_that_is_no_report_is_named(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"schema": "memledger/1", "plan": null}')
    with pytest.raises(NotAReportError, match="a plan"):
        read_json(str(file))
    file.write_text('{"schema": "memledger/2"}')
    with pytest.raises(NotAReportError, match="memledger/2"):
        read_json(str(file))
    file.write_text('{"schema": "memledger/1", "servers": 5}')
    with pytest.raises(NotAReportError, match="not a report"):
        read_json(str(file))
    file.write_text('{"schema": "memledger/1", "version": "0.1.0", "inp')
    with pytest.raises(NotAReportError, match="cut off"):
        read_json(str(file))


def test_a_snapshot_compares_like_its_log(logs, tmp_path):
    report = report_of(FIXTURES / "compare-engines" / "a.log")
    file = tmp_path / "s.json"
    file.write_bytes(
        snapshot.encode(snapshot.Snapshot(snapshot.SCHEMA, "0.1.0", Sample("2026-11-30T12:00:00"), report=report))
    )
    loaded = load_input(str(file), load_rules())
    first, second = logs["compare-engines"]
    got = compare(entrant(loaded.report, "A", first.path), second)
    assert got.steps == compare(first, second).steps
    file.write_bytes(
        snapshot.encode(snapshot.Snapshot(snapshot.SCHEMA, "0.1.0", Sample("2026-11-30T12:00:00"), kind="ps"))
    )
    with pytest.raises(NotAReportError, match="holds no report"):
        read_json(str(file))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(NotAReportError, match="cut off"):
        read_json(str(file))


def test_json_log_lines_are_a_log(tmp_path):
    file = tmp_path / "lines.json"
    file.write_text('{"message": "hello"}\n{"message": "again"}\n')
    assert read_json(str(file)) is None
    file.write_text('{"message": "hello"}')
    assert read_json(str(file)) is None


def test_an_unknown_pool_gives_no_steps_and_says_so():
    bare = Server("vllm", ranks=(Rank(tp=0, capacity=Capacity(kv_tokens=1000)),))
    found = compare(of_server(bare), of_server(hybrid(), "B"))
    assert found.steps == ()
    assert found.reason == "the size of the KV pool is not in the log of A: no steps in bytes"
    assert "KV pool ? against" in found.cause[0]
    untold = msgspec.structs.replace(hybrid_rank(), capacity=Capacity())
    text = compare_text.render(
        values.CompareReport("0", (), (), compare(of_server(hybrid(ranks=(untold,))), of_server(hybrid(), "B")))
    )
    assert "bytes per token: no token figure that goes with the pool: A" in text
    assert compare_text.render(values.CompareReport("0", (), (), found))


def test_a_server_that_did_not_come_up_says_why_and_what_both_logs_tell(logs):
    found = compared(logs, "compare-failed")
    assert found.steps == ()
    assert found.cause[1] == "B: The server failed while allocating the pools (kv too small)."
    assert found.cause[2] == (
        "Both logs tell: budget 69.06 against 11.77 GiB, weights 14.99 against 14.99 GiB; that leaves 54.07 against -3.22 GiB "
        "for the pool."
    )


def test_a_start_without_ranks_can_be_compared():
    found = compare(of_server(Server("sglang", state="failed")), of_server(hybrid(), "B"))
    assert found.steps == ()
    assert found.cause[1] == "A: it failed; its log does not say why."
    assert "not in the log of A" in found.cause[-1]


def test_the_smallest_pool_of_the_ranks_is_compared():
    def rank(tp, size):
        return Rank(tp=tp, entries=(entry("kv_cache/pool", gib(size), "logged"),))

    server = Server("vllm", ranks=(Rank(tp=0), rank(1, 30.0), rank(2, 29.0)))
    assert choose_rank(server, server.ranks).tp == 2


# Properties, on servers made of any figures

FIGURE = st.integers(0, 64 * 2**20).map(lambda n: Amount(n * 1024, 5_368_710))


@st.composite
def servers(draw):
    framework = draw(st.sampled_from(["sglang", "vllm"]))
    vllm = framework == "vllm"
    entries = []
    for account, chance in (
        ("weights/model", 9),
        ("weights/draft", 3),
        ("kv_cache/draft", 3),
        ("recurrent_state/ssm", 3),
        ("kv_cache/swa_k", 2),
        ("activations", 6),
        ("non_torch", 6),
        ("weights_and_non_torch", 1),
        ("kv_cache/unused", 2),
        ("other_processes", 2),
        ("communication", 2),
        ("free", 8),
    ):
        if draw(st.integers(0, 9)) < chance:
            stage = draw(st.sampled_from(["weights", "pools", "final"]))
            entries.append(entry(account, draw(FIGURE), "logged", stage=stage, evidence=at(1)))
    if draw(st.integers(0, 9)) < 9:
        names = ["kv_cache/pool"] if vllm else ["kv_cache/k", "kv_cache/v"]
        token = draw(st.sampled_from([None, 32768]))
        detail = {"modelled": {"token_bytes": token}} if token else {}
        entries += [entry(name, draw(FIGURE), "logged", stage="pools", **detail) for name in names]
    total = draw(st.one_of(st.none(), st.integers(1, 200).map(lambda n: n * GIB)))
    budget = Budget()
    if draw(st.booleans()):
        static, slack = draw(FIGURE).bytes, draw(FIGURE).bytes
        charged = draw(st.sampled_from([None, True, False]))
        budget = Budget(static, slack, "a rule", draw(st.sampled_from([None, GIB])), charged)
    elif vllm and draw(st.integers(0, 9)) < 2:
        budget = Budget(rule="size of the KV pool given in bytes; no profiling")
    residual = close("device", Amount(total), entries) if total is not None else close(None, None, entries)
    capacity = Capacity(
        kv_tokens=draw(st.one_of(st.none(), st.integers(0, 10**7))),
        kv_blocks=draw(st.one_of(st.none(), st.integers(1, 10**5))),
        state_slots=draw(st.one_of(st.none(), st.integers(1, 500))),
        max_running_requests=draw(st.one_of(st.none(), st.integers(1, 500))),
        concurrency=Concurrency(
            draw(st.one_of(st.none(), st.integers(1, 10**6))),
            draw(st.one_of(st.none(), st.integers(1, 10**5).map(lambda n: n / 100))),
        ),
    )
    config = {
        "memory_fraction": draw(st.sampled_from([None, 0.85, 0.9])),
        "context_length": draw(st.sampled_from([None, 4096, 131072])),
        "speculative_algorithm": draw(st.sampled_from([None, "EAGLE"])),
    }
    rank = Rank(
        tp=0, gpu=Gpu(total_bytes=total), budget=budget, entries=tuple(entries), residual=residual, capacity=capacity
    )
    model = draw(st.sampled_from([None, "/models/example"]))
    return Server(framework, model=model, config=config, ranks=(rank,))


@given(servers(), servers())
def test_whatever_the_figures_steps_sum_and_mirror(first, second):
    a, b = of_server(first), of_server(second, "B")
    found, back = compare(a, b), compare(b, a)
    if not found.steps:
        assert found.reason is not None
        assert not back.steps
        return
    assert_sums(found)
    assert_mirrored(found, back)
    text = compare_text.render(values.CompareReport("0", (), (), found), Style(80))
    assert max(map(len, text.splitlines())) <= 80


@given(servers())
def test_whatever_the_figures_a_side_against_itself_is_all_zeros(server):
    found = compare(of_server(server), of_server(server, "B"))
    assert all(s.bytes == 0 and not s.kv_tokens for s in found.steps)


def vllm_pool(size, capacity, **detail):
    pool = entry("kv_cache/pool", gib(size), "logged", stage="pools", **detail)
    return Server("vllm", ranks=(Rank(tp=0, entries=(pool,), residual=close(None, None, (pool,)), capacity=capacity),))


def test_a_printed_figure_of_zero_tokens_has_no_sentence_about_what_is_counted():
    """Zero tokens go with no pool, so no step has tokens; the other side's figure is one per group of layers."""
    a = of_server(vllm_pool(20.0, Capacity(kv_tokens=0, kv_blocks=1000)))
    figures = Capacity(kv_tokens=75_000, concurrency=Concurrency(262_144, 1.01))
    b = of_server(vllm_pool(24.0, figures, includes_recurrent_state=True), "B")
    for found in (compare(a, b), compare(b, a)):
        assert {m.rule for m in found.meanings} == {"blocks", "blocks_per_group"}
        assert [s.kv_tokens for s in found.steps] == [None] * len(found.steps)
        assert step(found, "rounding_and_groups").note is not None
        assert "what the figure counts" not in " ".join(found.cause)
        assert "4.00 GiB" in found.cause[1]


# Several inputs, limits, reports


def test_several_inputs_are_a_table_whose_differences_are_marked(logs):
    entrants = [*logs["compare-capped"], logs["compare-draft"][1]]
    found = sweep(entrants)
    tokens = next(row for row in found.figures if row.name == "kv_tokens")
    assert tokens.values == (442961, 200000, 408472)
    assert tokens.differs
    weights = next(row for row in found.figures if row.name == "weights_bytes")
    assert not weights.differs
    text = compare_text.render(values.CompareReport("0", (), (), sweep=found), Style(80))
    assert "* KV tokens, printed" in text
    assert "* weights" not in text
    assert "442,961" in text
    assert max(map(len, text.splitlines())) <= 80


def test_more_columns_than_fit_come_in_pieces(logs):
    found = sweep([*logs["compare-capped"]] * 5)
    text = compare_text.render(values.CompareReport("0", (), (), sweep=found), Style(60))
    assert "capacity, continued" in text
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("kv_tokens=-5%", True),
        ("kv_tokens=-60%", False),
        ("kv_tokens=-1000", True),
        ("pool_bytes=-20GiB", True),
        ("pool_bytes=-40GiB", False),
        ("kv_bytes_per_token=+1%", False),
        ("requests_that_fit=-0", True),
    ],
)
def test_a_limit_holds_where_the_change_goes_beyond_it(text, holds, logs):
    assert expect.judge(expect.parse(text), compared(logs, "compare-capped")).holds is holds


def test_a_figure_that_the_new_log_lacks_holds_and_one_that_the_old_lacks_is_not_judged(logs):
    nothing = of_server(Server("sglang", state="failed"), "B")
    limit = expect.parse("kv_tokens=-5%")
    gone = expect.judge(limit, compare(logs["compare-capped"][0], nothing))
    assert gone.holds
    assert gone.note == "no kv_tokens in the new log"
    new = expect.judge(limit, compare(nothing, logs["compare-capped"][0]))
    assert not new.holds
    assert "not judged" in new.note


@pytest.mark.parametrize(
    "text", ["kv_tokens", "kv_tokens=5%", "tokens=-5%", "kv_tokens=-5GiB", "kv_tokens=-x%", "", "pool_bytes=-1GB2"]
)
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ValueError, match=r"write|there is no figure|is a count"):
        expect.parse(text)


def test_the_schema_in_docs_is_current(update_golden):
    if update_golden:
        SCHEMA_FILE.write_text(compare_json.schema_text(), encoding="utf-8")
    assert SCHEMA_FILE.read_text(encoding="utf-8") == compare_json.schema_text(), (
        "pytest --update-golden writes it anew"
    )


@pytest.mark.parametrize("case", CASES)
def test_documents_are_valid_and_keep_the_names_of_the_contract(case, logs):
    found = compared(logs, case)
    document = json.loads(compare_json.encode(values.CompareReport("0.1.0", (), (), found)))
    jsonschema.Draft202012Validator(compare_json.schema()).validate(document)
    comparison = document["comparison"]
    assert set(comparison["capacity"]) >= {"kv_tokens", "pool_bytes", "kv_bytes_per_token", "state_bytes_per_request"}
    assert set(comparison["steps"][0]) >= {"name", "bytes", "kv_tokens", "tolerance_bytes", "basis"}
    assert all({"name", "a", "b"} <= set(row) for row in comparison["differences"])


def test_markdown_has_the_same_figures_and_no_markup_of_a_log():
    server = hybrid(model="/models/<b>|evil|`x`")
    found = compare(of_server(server), of_server(hybrid(), "B"))
    text = compare_markdown.render(values.CompareReport("0.1.0", (), (), found))
    assert "<b>" not in text
    assert "evil" in text
    assert "\\|evil\\|" in text
    assert "| **A**" in text
    assert compare_markdown.render(values.CompareReport("0.1.0", (), ())) == ""


def test_text_without_unicode_is_ascii(logs):
    found = values.CompareReport("0", (), (), compared(logs, "compare-engines"))
    text = compare_text.render(found, Style(80, unicode=False))
    assert text.isascii()
    assert "----" in text
    assert "####" in text


@pytest.mark.parametrize("width", [40, 60, 71, 72, 100, 160])
def test_every_width_is_kept(width, logs):
    for case in CASES:
        text = compare_text.render(values.CompareReport("0", (), (), compared(logs, case)), Style(width))
        assert max(map(len, text.splitlines())) <= width


def test_the_block_size_of_an_old_log_comes_from_its_concurrency():
    capacity = Capacity(kv_blocks=83208, concurrency=Concurrency(4096, 325.03))
    side = side_of(Server("vllm"), Rank(tp=0, capacity=capacity))
    assert meaning.measure(side).printed == 83208 * 16
    vague = Capacity(kv_blocks=10, concurrency=Concurrency(4096, 0.53))
    assert meaning.measure(side_of(Server("vllm"), Rank(tp=0, capacity=vague))).printed is None


def test_per_byte_is_exact():
    rank = Rank(
        tp=0,
        entries=(entry("kv_cache/k", Amount(3 * GIB), "logged"),),
        capacity=Capacity(kv_tokens=7),
    )
    assert meaning.measure(side_of(Server("sglang"), rank)).per_byte == Fraction(7, 3 * GIB)


def test_a_report_type_reads_back_what_explain_writes():
    report = report_of(FIXTURES / "compare-engines" / "b.log")
    assert msgspec.json.decode(encode(report), type=Report).servers[0].framework == "vllm"


def sglang_with_draft(order, draft=2.0, pool=30.0):
    stages = {"weights": 70.0, "pools": 40.0, "draft_weights": 38.0, "graphs": 37.0}
    entries = (
        entry("weights/model", gib(10.0), "logged", stage="weights"),
        entry("kv_cache/k", gib(pool / 2), "logged", stage="pools"),
        entry("kv_cache/v", gib(pool / 2), "logged", stage="pools"),
        entry("weights/draft", gib(draft), "logged", stage="draft_weights"),
        entry("cuda_graphs/decode", gib(1.0), "logged", stage="graphs"),
        entry("free", gib(37.0), "logged", stage="final"),
    )
    readings = [(name, stages[name]) for name in order]
    one = rank(80.0, readings, entries, capacity=Capacity(kv_tokens=1000))
    budget = Budget(gib(40.0).bytes, gib(40.0).bytes, "a rule")
    return Server("sglang", ranks=(msgspec.structs.replace(one, budget=budget),))


def test_a_draft_loaded_after_the_pools_took_nothing_from_them():
    late = sglang_with_draft(["weights", "pools", "draft_weights", "graphs"])
    assert side_of(late, late.ranks[0]).parts["draft"].amount == Amount(0)
    early = sglang_with_draft(["weights", "draft_weights", "pools", "graphs"])
    assert side_of(early, early.ranks[0]).parts["draft"].amount.bytes == gib(2.0).bytes


def test_without_its_fraction_a_closed_ledger_says_what_stayed_outside_the_pools():
    server = sglang_with_draft(["weights", "pools", "draft_weights", "graphs"])
    told = server.ranks[0]
    untold = msgspec.structs.replace(told, budget=Budget())
    side = side_of(server, untold)
    assert side.as_read
    assert side.budget.bytes == gib(40.0).bytes
    found = compare(of_server(server), of_server(msgspec.structs.replace(server, ranks=(untold,)), "B"))
    assert found.form == "budget"
    assert all(s.bytes == 0 for s in found.steps)


def test_two_models_are_said_not_to_be_of_one_kind(logs):
    found = compare(logs["compare-engines"][0], logs["compare-card"][0])
    assert found.cause[-1] == "They are not of one kind: model Qwen3.8-27B-FP8 against Llama-3.1-8B-Instruct."
    assert_sums(found)


@pytest.mark.parametrize("case", ALL_CASES)
def test_our_own_figures_are_not_masked_as_secrets(case, logs):
    report = values.CompareReport("0.1.0", (), (), compared(logs, case))
    for text in (
        compare_text.render(report, Style(80)),
        compare_markdown.render(report),
        compare_json.encode(report).decode(),
    ):
        assert "***" not in text.replace("****", "")
