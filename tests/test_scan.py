"""Bytes to events: which lines become events, whatever stands around them and however the bytes arrive."""

import random
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memledger.events import Event
from memledger.grammar import LONGEST_PLAIN, Rule, RuleSet, compile_pattern, find, load_rules
from memledger.prefilter import MEMORY_LITERALS, PythonPrefilter, prefilter
from memledger.prefix import peel
from memledger.request_text import LONGEST_LINE, LONGEST_REQUEST
from memledger.scan import Scanner, check_rules
from memledger.units import GIB, Amount

POOL = Rule(
    id="pool",
    framework="sglang",
    anchor="Pool is allocated.",
    pattern=r"Pool is allocated\. #tokens: (?P<tokens>\d+), K size: (?P<k>[\d.]+) GB, V size: (?P<v>[\d.]+) GB",
    fields={"tokens": "count", "k": "GiB", "v": "GiB"},
    means="a pool",
)
WEIGHTS = Rule(
    id="weights",
    framework="sglang",
    anchor="Weights end.",
    pattern=r"Weights end\.(?: type=(?P<type>\w+),)?(?: avail=(?P<avail>[\d.]+) ?GB)?(?:, usage=(?P<usage>[\d.]+) ?GB)?",
    fields={"type": "text", "avail": "GiB", "usage": "GiB"},
    means="weights",
)
OUT_OF_MEMORY = Rule(
    id="oom",
    framework="any",
    kind="failure",
    anchor="CUDA out of memory",
    pattern=r"CUDA out of memory\.",
    means="out of memory",
)
USAGE = Rule(
    id="usage",
    framework="sglang",
    kind="usage",
    anchor="Decode batch",
    pattern=r"Decode batch, #running: (?P<running>\d+), usage: (?P<usage>[\d.]+)(?:, #retracted: (?P<retracted>\d+))?",
    fields={"running": "count", "usage": "float", "retracted": "count"},
    means="use",
)
BAR = Rule(
    id="bar", framework="any", kind="not_memory", anchor="Downloading", pattern=r"Downloading .*", means="a download"
)
RULES = RuleSet([POOL, WEIGHTS, OUT_OF_MEMORY, USAGE, BAR])

STAMP = "[2026-05-01 22:44:30 TP1] "
POOL_LINE = STAMP + "Pool is allocated. #tokens: 1000, K size: 1.50 GB, V size: 1.50 GB"


def scan(text: str | bytes, block: int = 1 << 20, *, fallback: bool = False) -> tuple[list[Event], Scanner]:
    data = text.encode() if isinstance(text, str) else text
    scanner = Scanner(RULES, fallback=fallback)
    return list(scanner.events([data[i : i + block] for i in range(0, len(data), block)], 0)), scanner


def shown(events: list[Event]) -> list[tuple[int, str, dict[str, object]]]:
    return [(e.line, e.id, {k: v for k, v in e.fields.items() if v is not None}) for e in events]


def test_an_event_has_its_fields_its_prefix_and_its_line() -> None:
    [event], scanner = scan(f"first\n\n{POOL_LINE}\nlast")
    assert (event.id, event.line, event.input) == ("pool", 3, 0)
    assert event.count("tokens") == 1000
    assert event.amount("k") == Amount(GIB * 3 // 2, 5368710)
    assert event.prefix.ranks == {"tp": 1}
    assert event.text == POOL_LINE
    assert (scanner.lines, scanner.bytes) == (4, len(f"first\n\n{POOL_LINE}\nlast"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\r\n", ""])
def test_line_ends(end: str) -> None:
    [event], _ = scan(f"a{end or chr(10)}{POOL_LINE}{end}")
    assert (event.line, event.message) == (2, POOL_LINE[len(STAMP) :])


def test_a_bar_that_ends_with_a_carriage_return() -> None:
    [event], _ = scan(f"\r 33%|███   | 1/3\r100%|█████| 3/3\r{POOL_LINE}\n")
    assert event.line == 1


def test_a_record_after_a_carriage_return_keeps_the_stream_of_its_line() -> None:
    bar = "Capturing: 100%|█████| 3/3 [00:01<00:00,  2.1it/s]"
    [event], _ = scan(f"llm-1  | \r 33%|███   | 1/3\r{bar}{POOL_LINE}\n")
    assert (event.prefix.source, event.prefix.ranks) == ("llm-1", {"tp": 1})


def test_bytes_that_are_no_utf8_do_not_hide_an_event() -> None:
    [event], _ = scan(b"\xff\xfe\x80\n\xe9" + b"\n" + POOL_LINE.encode() + b" \xff\n")
    assert event.line == 3


# ---- records that were wrapped


@pytest.mark.parametrize(
    ("cut", "indent"), [(", K size", ""), (", K size", "         "), (" GB, V", ""), ("V size: ", "  "), ("00, K", "")]
)
def test_a_record_wrapped_by_a_terminal_or_by_hand(cut: str, indent: str) -> None:
    at = POOL_LINE.index(cut) + (1 if cut.startswith(",") else 0)
    [event], _ = scan(f"{POOL_LINE[:at]}\n{indent}{POOL_LINE[at:]}\nmore\n")
    assert (event.count("tokens"), event.line) == (1000, 1)
    assert event.amount("v") == Amount(GIB * 3 // 2, 5368710)


def test_a_record_wrapped_over_three_lines() -> None:
    [event], _ = scan(f"{STAMP}Pool is allocated. #tokens: 1000,\nK size: 1.50 GB,\nV size: 1.50 GB\n")
    assert event.count("tokens") == 1000


def test_a_wrapped_record_is_completed_though_its_first_line_is_enough() -> None:
    [event], _ = scan(f"{STAMP}Weights end. type=Model,\n   avail=7.95 GB, usage=14.76 GB\n")
    assert set(shown([event])[0][2]) == {"type", "avail", "usage"}


def test_a_number_cut_by_the_terminal_is_not_read_as_the_whole_number() -> None:
    rule = Rule(
        id="n",
        framework="sglang",
        anchor="slots:",
        pattern=r"slots: (?P<n>\d+)(?:, used: (?P<used>\d+))?",
        fields={"n": "count", "used": "count"},
        means="slots",
    )
    scanner = Scanner(RuleSet([rule]))
    [event] = scanner.events([b"slots: 12\n34, used: 5\n"], 0)
    assert (event.count("n"), event.count("used")) == (1234, 5)


@pytest.mark.parametrize("following", ["192.0.2.1 - - GET", "100%|██| 3/3 [00:01<00:00, 1.2it/s]", "7", "1.5"])
def test_a_number_at_the_end_of_a_line_is_not_glued_to_another_programs_line(following: str) -> None:
    events, _ = scan(usage_line(3, 0.5, retracted=4) + following + "\n")
    assert maxima(events)["usage", "retracted", (("tp", 0),)] == 4


def test_lines_that_completed_a_record_are_no_records_of_their_own() -> None:
    rule = Rule(
        id="oom",
        framework="any",
        kind="failure",
        anchors=("out of memory", "Tried to"),
        pattern=r"CUDA out of memory\.(?: Tried to allocate (?P<tried>[\d.]+) GiB\.)?(?: GPU 0 has (?P<total>[\d.]+) GiB)?"
        r"|Tried to allocate (?P<tried>[\d.]+) GiB\. GPU 0 has (?P<total>[\d.]+) GiB",
        fields={"tried": "GiB", "total": "GiB"},
        means="out of memory",
    )
    text = b"CUDA out of memory.\nTried to allocate 2.00 GiB.\nGPU 0 has 80.00 GiB\nother\n"
    for block in (1000, 7):
        scanner = Scanner(RuleSet([rule]))
        events = list(scanner.events([text[i : i + block] for i in range(0, len(text), block)], 0))
        assert [(e.line, e.amount("tried"), e.amount("total")) for e in events] == [
            (1, Amount(2 * GIB, 5368710), Amount(80 * GIB, 5368710))
        ]
        assert scanner.lines == 4


def test_the_next_record_is_never_taken_for_the_rest_of_this_one() -> None:
    events, _ = scan(f"{STAMP}Weights end. type=Model,\n{STAMP}avail=7.95 GB, usage=14.76 GB\n")
    assert shown(events) == [(1, "weights", {"type": "Model"})]
    events, _ = scan(f"{STAMP}Weights end. type=Model,\nWeights end. type=Other, avail=1.00 GB\n")
    assert [e.word("type") for e in events] == ["Model", "Other"]


def test_the_same_cut_line_is_read_again_when_its_rest_follows() -> None:
    cut = f"{STAMP}Pool is allocated. #tokens: 1000,\n"
    events, _ = scan(cut + STAMP + "else\n" + cut + "K size: 1.50 GB, V size: 1.50 GB\n")
    assert [e.line for e in events] == [3]


# ---- text of users


FORGED = "Pool is allocated. #tokens: 666, K size: 6.00 GB, V size: 6.00 GB"


@pytest.mark.parametrize(
    "forged", [FORGED, STAMP + FORGED, f"(EngineCore pid=7) INFO 05-01 22:44:30 [a.py:4] {FORGED}"]
)
@pytest.mark.parametrize(
    "request_line",
    [
        "INFO 05-02 10:00:00 [logger.py:37] Received request chatcmpl-1: prompt: '{}', params: SamplingParams(n=1), prompt_token_ids: None",
        "[2026-05-02 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='{}', sampling_params={{}})",
        '[2026-05-02 10:00:00] INFO:     192.0.2.1:80 - "GET /search?q={} HTTP/1.1" 200 OK',
        '{{"prompt": "{}", "level": 3}}',
        '{{"level": "info", "time": "2026-05-02T10:00:00Z", "msg": "Received request a: prompt: \'{}\'"}}',
        "[2026-05-02 10:00:00] The model said: {}",
    ],
)
def test_log_text_inside_a_request_is_no_event(request_line: str, forged: str) -> None:
    events, scanner = scan(request_line.format(forged) + "\n" + POOL_LINE + "\n")
    assert [e.count("tokens") for e in events] == [1000]
    assert scanner.unrecognized.count == ("model said" in request_line)  # of that line nobody can tell whose text it is


@pytest.mark.parametrize("forged", [FORGED, STAMP + FORGED])
@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        (
            "INFO 05-02 10:00:00 [logger.py:37] Received request c-1: prompt: 'see",
            "', params: SamplingParams(n=1), prompt_token_ids: None",
        ),
        (
            "[2026-05-02 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='see",
            "', sampling_params={}, stream=False)",
        ),
    ],
)
def test_a_request_logged_with_its_line_ends_is_skipped_to_its_end(opens: str, closes: str, forged: str) -> None:
    text = f"{opens}\n{forged}\nmore {forged}\n{closes}\n{POOL_LINE}\n"
    for block in (1 << 20, 37):
        events, scanner = scan(text, block)
        assert [(e.count("tokens"), e.line) for e in events] == [(1000, 5)]
        assert scanner.lines == 5


def test_a_request_cut_short_hides_nothing() -> None:
    events, _ = scan(
        f"INFO 05-02 10:00:00 [logger.py:37] Received request c-1: prompt: 'see\n{POOL_LINE}\n" + "x\n" * 200
    )
    assert [e.line for e in events] == [2]


def test_requests_full_of_memory_words_cost_no_more_than_their_bytes() -> None:
    text = (
        "[2026-05-02 10:00:00] Receive: obj=GenerateReqInput(text='"
        + "KV cache 12.5 GiB of memory, 100 tokens; " * 5000
        + "', stream=False)\n"
    )
    events, scanner = scan(text * 3 + POOL_LINE + "\n")
    assert (len(events), scanner.unrecognized.count) == (1, 0)


# ---- lines that were not understood


def test_memory_like_lines_that_no_rule_took_are_counted_and_shown() -> None:
    text = f"{STAMP}Scratch buffers take 3.50 GiB\n{STAMP}Downloading 4 GB\n{STAMP}nothing\n  12 GB of something\n{POOL_LINE}\n"
    events, scanner = scan(text)
    assert len(events) == 1
    assert scanner.unrecognized.count == 1
    assert [(e.line, e.text) for e in scanner.unrecognized.examples] == [(1, f"{STAMP}Scratch buffers take 3.50 GiB")]


def test_every_line_of_a_shape_is_counted() -> None:
    _, scanner = scan("".join(f"{STAMP}Scratch buffers take {n}.50 GiB\n" for n in range(1, 6)))
    assert scanner.unrecognized.count == 5


@pytest.mark.parametrize(
    "line", ["4.2 GB/s read", "at 300 tokens/s with the KV cache", "model-8GB-v2 loaded", "v2.27.5 GBs"]
)
def test_rates_and_names_are_not_memory(line: str) -> None:
    _, scanner = scan(f"{STAMP}{line}\n")
    assert scanner.unrecognized.count == 0


def test_an_exceptions_name_does_not_hide_the_message() -> None:
    events, _ = scan(
        f"{STAMP}torch.OutOfMemoryError: CUDA out of memory. Tried\nException: RuntimeError: CUDA out of memory. Tried\n"
    )
    assert [e.id for e in events] == ["oom", "oom"]


# ---- containers


def test_cri_fragments_become_one_record() -> None:
    stamp = "2026-05-01T22:44:30.255123456Z stderr "
    at = POOL_LINE.index("K size")
    [event], _ = scan(f"{stamp}F a\n{stamp}P {POOL_LINE[:at]}\n{stamp}F {POOL_LINE[at:]}\n{stamp}F b\n")
    assert (event.line, event.count("tokens")) == (2, 1000)


def test_a_later_fragment_starts_no_record() -> None:
    stamp = "2026-05-01T22:44:30.255123456Z stderr "
    events, _ = scan(f"{stamp}P the prompt was: \n{stamp}F {POOL_LINE}\n{stamp}F {POOL_LINE}\n")
    assert [e.line for e in events] == [3]


# ---- usage


def usage_line(running: int, usage: float, rank: int = 0, retracted: int | None = None, second: int = 0) -> str:
    more = "" if retracted is None else f", #retracted: {retracted}"
    return f"[2026-05-01 22:44:{second:02d} TP{rank}] Decode batch, #running: {running}, usage: {usage:.2f}{more}\n"


def maxima(events: list[Event]) -> dict[tuple[object, ...], float]:
    found: dict[tuple[object, ...], float] = {}
    for event in events:
        for name, value in event.fields.items():
            if event.rule.kind == "usage" and isinstance(value, (int, float)):
                key = (event.id, name, tuple(event.prefix.ranks.items()))
                found[key] = max(found.get(key, -1), value)
    return found


def test_of_many_usage_lines_those_with_the_peaks_are_events_with_their_own_lines() -> None:
    lines = [usage_line(n % 7, (n * 37 % 100) / 100, second=n % 60) for n in range(500)]
    events, _ = scan("".join(lines))
    assert len(events) < 12
    assert max(e.count("running") or 0 for e in events) == 6
    peak = max(events, key=lambda e: e.number("usage") or 0)
    assert peak.text == lines[peak.line - 1].strip()
    assert peak.number("usage") == 0.99
    assert (events[0].line, events[-1].line) == (1, 500)


def test_peaks_are_kept_apart_by_rank() -> None:
    events, _ = scan("".join(usage_line(3 + rank, 0.1 * (rank + 1), rank) for _ in range(50) for rank in range(3)))
    assert {k: v for k, v in maxima(events).items() if k[1] == "running"} == {
        ("usage", "running", (("tp", r),)): 3 + r for r in range(3)
    }


def test_a_usage_figure_without_digits_is_no_figure_and_hides_no_peak() -> None:
    broken = usage_line(3, 0.5).replace("0.50", ".")
    events, scanner = scan(usage_line(2, 0.4) + broken + usage_line(1, 0.6))
    assert maxima(events)["usage", "usage", (("tp", 0),)] == 0.6
    assert scanner.lines == 3


def test_lines_that_count_something_are_all_events() -> None:
    events, _ = scan("".join(usage_line(1, 0.1, retracted=int(n in {20, 30})) for n in range(50)))
    assert sum(e.count("retracted") or 0 for e in events) == 2
    assert {21, 31} <= {e.line for e in events}


def test_peaks_start_anew_after_any_other_event() -> None:
    text = usage_line(9, 0.9) + usage_line(2, 0.2) + POOL_LINE + "\n" + usage_line(4, 0.4) + usage_line(3, 0.3)
    events, _ = scan(text)
    assert [(e.line, e.count("running")) for e in events if e.id == "usage"] == [(1, 9), (2, 2), (4, 4), (5, 3)]
    assert [e.id for e in events] == ["usage", "usage", "pool", "usage", "usage"]


def test_other_text_in_a_usage_line_is_another_shape() -> None:
    events, _ = scan(usage_line(1, 0.1) * 20 + usage_line(1, 0.1).replace("Decode", "vllm-1  | Decode") * 20)
    assert len(events) == 2


# ---- however the bytes arrive


LINES = st.sampled_from(
    [
        POOL_LINE,
        POOL_LINE[:50],
        POOL_LINE[50:],
        STAMP + "Weights end. type=Model, avail=1.00 GB, usage=2.00 GB",
        STAMP + "Weights end. type=Model,",
        "avail=1.00 GB, usage=2.00 GB",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "100%|██| 3/3 [00:01<00:00, 1.20it/s]" + POOL_LINE,
        "  7%|█ | 1/3\r" + POOL_LINE + "\r",
        STAMP + "Scratch 3.50 GiB",
        "Downloading 3.50 GB",
        '192.0.2.1 - "GET /v1/models HTTP/1.1" 200 OK',
        "INFO 05-02 10:00:00 [logger.py:37] Received request c-1: prompt: 'a",
        "b', params: SamplingParams(n=1)",
        "",
        usage_line(3, 0.5).strip(),
        usage_line(30, 0.25, rank=1).strip(),
        usage_line(30, 0.25, retracted=1).strip(),
    ]
)


@given(lines=st.lists(LINES, max_size=25), block=st.integers(1, 400), end=st.sampled_from(["", "\n", "\r\n"]))
@example(
    [POOL_LINE[:50]] * 3
    + [usage_line(3, 0.5).strip()] * 2
    + [usage_line(30, 0.25, retracted=1).strip(), '192.0.2.1 - "GET /v1/models HTTP/1.1" 200 OK'],
    1,
    "",
)
@settings(max_examples=200, deadline=None)
def test_blocks_of_any_size_give_the_same_events(lines: list[str], block: int, end: str) -> None:
    text = (end or "\n").join(lines) + end
    whole, scanner = scan(text)
    pieces, other = scan(text, block)
    assert shown([e for e in pieces if e.rule.kind != "usage"]) == shown([e for e in whole if e.rule.kind != "usage"])
    assert maxima(pieces) == maxima(whole)
    assert (other.lines, other.bytes) == (scanner.lines, scanner.bytes)
    assert other.unrecognized == scanner.unrecognized
    assert [e.line for e in pieces] == sorted(e.line for e in pieces)


@given(lines=st.lists(LINES, max_size=25))
@settings(max_examples=200, deadline=None)
def test_the_fallback_gives_the_same_events(lines: list[str]) -> None:
    text = "\n".join(lines)
    fast, scanner = scan(text)
    slow, other = scan(text, fallback=True)
    assert shown(slow) == shown(fast)
    assert other.unrecognized == scanner.unrecognized


@given(st.binary(max_size=600))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_without_failing(data: bytes) -> None:
    _, scanner = scan(data + POOL_LINE.encode()[:30] + data)
    assert scanner.bytes == 2 * len(data) + 30


@given(st.lists(st.sampled_from([*RULES.anchors, "GiB", " GB", "x", "\n", "ow", "Decode"]), max_size=40))
def test_both_prefilters_find_the_same_literals_in_the_same_lines(words: list[str]) -> None:
    literals = [a.encode() for a in RULES.anchors] + list(MEMORY_LITERALS)
    block = "".join(words).encode()
    both = [
        {(literal, block.count(b"\n", 0, end)) for literal, end in p.scan(block)}
        for p in (prefilter(literals), PythonPrefilter(literals))
    ]
    assert both[0] == both[1]


def test_an_empty_block_means_that_what_is_there_is_read_now() -> None:
    scanner = Scanner(RULES)
    blocks = iter([POOL_LINE.encode() + b"\n", b"", b"more\n"])
    events = scanner.events(blocks, 0)
    assert next(events).line == 1
    assert list(blocks) == [b"more\n"]


def test_a_line_that_never_ends_is_cut_and_what_follows_it_is_read() -> None:
    long = b"x" * (LONGEST_LINE * 2) + FORGED.encode() + b"\n" + POOL_LINE.encode() + b"\n"
    for block in (1 << 16, 1 << 20):
        events, scanner = scan(long, block)
        assert [(e.line, e.count("tokens")) for e in events] == [(2, 1000)]
        assert scanner.lines == 2


@pytest.mark.parametrize("length", [LONGEST_LINE - 1, LONGEST_LINE, LONGEST_LINE * 3 + 7])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_single_long_line_is_one_line(length: int, end: str) -> None:
    for block in (1 << 16, LONGEST_LINE, 1 << 23):
        events, scanner = scan("x" * length + end, block)
        assert (events, scanner.lines, scanner.bytes) == ([], 1, length + len(end))


@pytest.mark.parametrize(
    "text", ["Weights end. type=M, KV cache 12.5 GiB; ", "Received request a: prompt: 'GiB ", "\\n 3 GB"]
)
def test_what_is_held_in_memory_does_not_grow_with_a_line(text: str) -> None:
    seen: list[int] = []
    scanner = Scanner(RULES)
    whole = scanner.matcher

    class Watched:
        name = "watched"

        def scan(self, block: bytes) -> list[tuple[int, int]]:
            seen.append(len(block))
            return whole.scan(block)

    scanner.matcher = Watched()
    line = (STAMP + text * (6 * LONGEST_LINE // len(text))).encode()
    data = line + b"\n" + POOL_LINE.encode()
    events = list(scanner.events((data[i : i + 65536] for i in range(0, len(data), 65536)), 0))
    assert [(e.id, e.line) for e in events][-1] == ("pool", 2)
    assert max(seen) <= LONGEST_LINE + LONGEST_REQUEST + 2 * 65536


def test_ten_megabytes_of_bars_on_one_line() -> None:
    bars = b"".join(b"\r %2d%%|##  | 1/3 [00:01<00:00, 1.2it/s]" % (n % 100) for n in range(250_000))
    events, scanner = scan(bars + b"\r" + POOL_LINE.encode() + b"\n" + POOL_LINE.encode())
    assert [e.line for e in events] == [1, 2]
    assert scanner.lines == 2


# ---- the bundled rules


@pytest.fixture(scope="module")
def bundled() -> RuleSet:
    return load_rules()


def test_every_sample_of_the_bundled_rules_is_read_as_it_says(bundled: RuleSet) -> None:
    assert check_rules(bundled) == []


def test_no_anchor_of_a_bundled_rule_is_in_an_access_line(bundled: RuleSet) -> None:
    """One such anchor would make every access line a line to be looked at."""
    lines = (
        '[2026-09-09 12:00:00] INFO:     127.0.0.1:40442 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        '(APIServer pid=412) INFO:     192.0.2.7:51234 - "GET /metrics HTTP/1.1" 200 OK\n'
        '(APIServer pid=412) INFO:     192.0.2.7:51234 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    )
    assert [a for a in bundled.anchors if a in lines] == []


def test_samples_in_random_order_give_the_same_events_with_both_prefilters(bundled: RuleSet) -> None:
    lines = [sample.line for rule in bundled.rules for sample in rule.sample]
    random.Random(3).shuffle(lines)
    data = "\n".join(lines).encode()
    found = []
    for fallback in (False, True):
        scanner = Scanner(bundled, fallback=fallback)
        found.append((shown(list(scanner.events([data], 0))), scanner.unrecognized))
    assert found[0] == found[1]
    assert len(found[0][0]) > len(lines) / 2


def test_re_and_regex_read_the_same_from_every_sample(bundled: RuleSet) -> None:
    """Ordinary lines are matched by `re`, long ones by `regex`."""
    for rule in bundled.rules:
        if any(kind.endswith("*") for kind in rule.fields.values()):
            continue
        for sample in rule.sample:
            message = peel(sample.line)[1]
            plain, timed = find(rule, message), compile_pattern(rule.pattern).match(message)
            assert (plain is None) == (timed is None), rule.full_id
            if plain is not None and timed is not None:
                assert plain.groupdict() == timed.groupdict(), rule.full_id


def test_re_needs_no_more_than_linear_time_either(bundled: RuleSet) -> None:
    for rule in bundled.rules:
        start = re.split(r"[\\(\[.?*+{|]", rule.pattern, maxsplit=1)[0]
        for filler in (rule.literals[0] + " ", "1", "a, ", " ", "(", ", x: 1"):
            line = (start + rule.literals[0] + filler * LONGEST_PLAIN)[:LONGEST_PLAIN]
            began = time.perf_counter()
            find(rule, line)
            assert time.perf_counter() - began < 0.5, rule.full_id


def test_patterns_need_no_more_than_linear_time(bundled: RuleSet) -> None:
    """A hostile line (an anchor, then a long run of anything) must not hold up a pattern."""
    for rule in bundled.rules:
        start = re.split(r"[\\(\[.?*+{|]", rule.pattern, maxsplit=1)[0]
        for filler in (rule.literals[0] + " ", "1", "a, ", " "):
            line = start + rule.literals[0] + filler * (20_000 // len(filler))
            compile_pattern(rule.pattern).match(line, timeout=0.5)  # raises TimeoutError


@pytest.mark.parametrize(
    "line",
    [
        "[Worker] Memory pool end. avail mem=3.39 GB",
        "# GPU KV cache size: 803,600 tokens",
        "TP6] Memory pool end. avail mem=1.00 GB",
    ],
)
def test_a_figure_behind_a_prefix_that_is_not_known_is_counted_not_passed_over(line: str) -> None:
    scanner = Scanner(load_rules())
    assert list(scanner.events([line.encode() + b"\n"], 0)) == []
    assert scanner.unrecognized.count == 1
    assert scanner.unrecognized.examples[0].text == line
