"""The text report: what a reader sees first, the table, the facts below, and the golden reports of the fixture logs."""

import re
from pathlib import Path

import msgspec
import pytest
from sample_reports import at, dense, dense_rank, gib, hybrid, hybrid_rank, rank, report

from memledger import findings
from memledger.ledger import (
    Budget,
    Capacity,
    Concurrency,
    Engine,
    Evidence,
    Failure,
    Gpu,
    Rank,
    Span,
    Unrecognized,
    Usage,
    entry,
)
from memledger.report.text import Style, line_numbers, render
from memledger.report.view import Options, choose_servers, label_range, model_name, number_ranges

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


def text(*servers, width=110, options=None, style=None, **changes):
    shown = findings.attach(report(*servers, **changes))
    return render(shown, options or Options(command="memledger explain server.log"), style or Style(width))


def row(output, label):
    return next(line for line in output.splitlines() if line.startswith(label + " "))


def test_the_header_says_which_server_this_is():
    first = text(hybrid(), width=140).splitlines()[0]
    assert first == "SGLang 0.5.18 · Qwen3.8-27B-FP8 · 1 GPU · serving · 2026-09-09 11:57:18, 6 h of log, 1 start"


def test_what_the_log_does_not_say_is_said():
    first = text(dense(model=None, framework_version=None, state="unknown")).splitlines()[0]
    assert first == "SGLang · model not in the log · 1 GPU · state not in the log, 1 start"


def test_the_cause_comes_before_the_table():
    lines = text(hybrid()).splitlines()
    assert lines[2].startswith("17.9 GiB is recurrent state for 124 slots, room for 24 requests")
    assert "[ML101]" in "".join(lines[2:6])
    assert next(i for i, line in enumerate(lines) if line.startswith("GPU 0")) > 4


def test_without_a_finding_the_plain_truth_comes_first():
    output = text(dense(), width=200)
    assert (
        "Of the 23.5 GiB free at the start, weights hold 15.0 GiB (64 %) and the KV cache 5.00 GiB (21 %); 3.50 GiB are free, nothing is unexplained."
        in output
    )


def test_the_rows_add_up_to_the_opening():
    output = text(hybrid())
    figures = {}
    for line in output.splitlines():
        if found := re.match(r"(\S.*?)\s{2,}[▏▎▍▌▋▊▉█]*\s+(-?[\d,]+\.\d\d)\s", line):
            figures[found[1]] = float(found[2].replace(",", ""))
    opening = figures.pop("free at the start")
    assert opening == 78.48
    assert sum(figures.values()) == pytest.approx(opening, abs=0.005 * len(figures))


def test_a_row_carries_size_share_basis_line_and_what_stands_behind_it():
    assert re.fullmatch(
        r"KV cache +█+\S? +20\.16 +25\.7% +logged +88 +330,323 tokens x 64 KiB, bf16",
        row(text(hybrid()), "KV cache"),
    )
    assert "124+1 slots x 146.8 MiB" in row(text(hybrid()), "recurrent state")
    assert "prefill 2.00 + decode 0.10" in row(text(hybrid()), "CUDA graphs")
    assert re.search(r"assumed +FlashInfer$", row(text(hybrid()), "workspace"))


def test_the_residual_is_signed_and_says_where_it_arose():
    assert "±" in row(text(hybrid()), "unexplained")
    assert "between pools and capture" in row(text(hybrid()), "unexplained")
    entries = (
        entry("weights/model", gib(15.0), "logged", stage="weights"),
        entry("free", gib(10.0), "logged", stage="final"),
    )
    over = text(dense(ranks=(rank(23.0, [("weights", 10.0)], entries),)))
    assert "-2.00" in row(over, "over-counted")
    assert "does not close" in row(over, "free at the start")


def test_candidates_are_named_where_memory_is_missing():
    entries = (
        entry("weights/model", gib(10.0), "logged", stage="weights"),
        entry("free", gib(10.0), "logged", stage="final"),
    )
    output = text(
        dense(
            ranks=(
                rank(
                    23.0,
                    [("weights", 13.0), ("warmup", 10.0)],
                    entries,
                    candidates={"warmup": ("attention workspaces", "cuBLAS")},
                ),
            )
        )
    )
    assert "candidates: attention workspaces, cuBLAS" in output


def test_an_open_ledger_says_why():
    base = dense_rank()
    residual = msgspec.structs.replace(base.residual, verdict="open", reason="no free-memory reading after start-up")
    output = text(dense(ranks=(msgspec.structs.replace(base, residual=residual),)))
    assert "open: no free-memory reading after start-up" in output


def test_a_gap_inside_the_tolerance_is_no_gap():
    for left in (3.51, 3.49):
        entries = (
            entry("weights/model", gib(15.0), "logged", stage="weights"),
            entry("kv_cache/k", gib(5.0), "logged", stage="pools"),
            entry("free", gib(3.5), "logged", stage="final"),
        )
        base = rank(20.0 + left, [("weights", 5.0 + left), ("pools", 3.5)], entries)
        output = text(dense(ranks=(base, msgspec.structs.replace(base, tp=1))), width=200)
        assert "3.50 GiB are free, nothing is unexplained within the tolerance." in output
        assert "worst" not in output
        assert "unexplained" not in output.splitlines()[-4]
        assert re.search(r"^unexplained .*(?<!\d)-?0\.01 .*±0\.02", output, re.MULTILINE)


def test_accounts_of_next_to_nothing_are_not_among_the_largest():
    entries = (
        entry("weights/model", gib(15.0), "logged", stage="weights"),
        entry("cuda_graphs/decode", gib(0.1), "logged", stage="graphs"),
        entry("free", gib(8.4), "logged", stage="final"),
    )
    server = dense(ranks=(rank(23.5, [("weights", 8.5), ("graphs", 8.4)], entries),))
    assert "weights hold 15.0 GiB (64 %); 8.40 GiB are free" in text(server, width=200)


@pytest.mark.parametrize("width", range(40, 120))
def test_no_line_begins_with_the_unit_of_a_number(width):
    assert not re.search(r"^ *(%|GiB|MiB|KiB)", text(hybrid(), dense(), width=width), re.MULTILINE)


class TestLogLength:
    def head(self, server):
        return text(server, width=160).splitlines()[0]

    def test_excerpts_of_different_days_have_no_length(self):
        pasted = hybrid(started_at="2025-05-04T10:00:00", ended_at="2025-12-12T08:44:00", span=(Span(0, 1, 40),))
        assert "of log" not in self.head(pasted)
        whole = msgspec.structs.replace(pasted, span=(Span(0, 1, 60000),))
        assert "222 days of log" in self.head(whole)

    def test_times_without_a_year_have_one(self):
        assert "06-16 14:13:11, 50 min of log" in self.head(
            hybrid(started_at="--06-16T14:13:11", ended_at="--06-16T15:03:11")
        )

    def test_no_time_at_all_is_no_length(self):
        assert "of log" not in self.head(hybrid(ended_at="2026-09-09T11:57:18"))


class TestFolding:
    def ranks(self, *weights):
        return tuple(dense_rank(tp, w) for tp, w in enumerate(weights))

    def test_equal_ranks_are_one_table_that_shows_the_worst(self):
        output = text(dense(ranks=self.ranks(15.0, 15.0, 15.03, 15.0), config={"tp_size": 4}))
        assert output.count("weights  ") == 1
        assert "TP0-TP3, " in output
        assert "the 4 ranks differ by at most 0.03 GiB (weights)" in output

    def test_a_rank_that_differs_has_a_table_of_its_own(self):
        output = text(dense(ranks=self.ranks(15.0, 15.0, 12.0, 15.0), config={"tp_size": 4}))
        assert "TP0-TP1, TP3" in output
        assert re.search(r"^TP2 ", output, re.MULTILINE)

    def test_many_different_ranks_end_in_lines(self):
        output = text(dense(ranks=self.ranks(*(9.0 + i for i in range(7)))))
        assert output.count("free at the start") >= 4
        assert re.search(r"^TP6: weights 15\.00, KV cache 5\.00, free 3\.50", output, re.MULTILINE)

    def test_one_rank_can_be_asked_for(self):
        output = text(dense(ranks=self.ranks(15.0, 15.0, 12.0)), options=Options(rank="tp2"))
        assert "TP2" in output
        assert "TP0" not in output.split("\n\n", 2)[2]

    def test_a_rank_that_is_not_there_is_an_error_that_names_those_that_are(self):
        with pytest.raises(LookupError, match=r"no rank 'TP9' \(did you mean 'TP1'\?\): the log has TP0, TP1"):
            text(dense(ranks=self.ranks(15.0, 15.0)), options=Options(rank="TP9"))

    def test_the_first_sentence_is_about_the_ranks_asked_for(self):
        server = dense(ranks=self.ranks(15.0, 15.0, 12.0, 15.0), config={"tp_size": 4})
        assert "on TP2, " in text(server)
        assert "free at the start on TP1, weights hold 15.0 GiB" in text(server, options=Options(rank="TP1"), width=200)

    def test_a_finding_about_another_rank_gives_way_to_what_it_says_of_this_one(self):
        crowded = [
            rank(
                80.0,
                [("init", 80.0 - used), ("weights", 65.0 - used), ("final", 65.0 - used)],
                (
                    entry("in_use_at_start", gib(used), "derived", stage="init"),
                    entry("weights/model", gib(15.0), "logged", stage="weights"),
                    entry("free", gib(65.0 - used), "logged", stage="final"),
                ),
                tp=tp,
                base="device",
            )
            for tp, used in enumerate((30.0, 20.0, 1.0))
        ]
        server = dense(ranks=tuple(crowded), config={"tp_size": 3})
        assert "30.0 GiB on TP0 was in use" in text(server, width=200)
        assert "20.0 GiB was in use" in text(server, options=Options(rank="TP1"), width=200)
        assert "was in use" not in text(server, options=Options(rank="TP2"), width=200)

    def test_ranks_of_one_label_are_told_apart_by_their_process(self):
        server = dense(ranks=tuple(dense_rank(0, 15.0, pid=pid) for pid in (101, 102, 103)), config={"dp_size": 3})
        assert "TP0 (3 ranks, pid 101 ... 103), shown TP0 (pid 101)" in text(server)
        assert re.search(r"^TP0 \(pid 102\)", text(server, options=Options(rank="pid 102")), re.MULTILINE)
        with pytest.raises(LookupError, match=re.escape("the log has TP0 (pid 101), TP0 (pid 102)")):
            text(server, options=Options(rank="TP5"))

    def test_label_ranges(self):
        assert number_ranges("TP", [0, 1, 2, 3, 5, 8]) == "TP0-TP3, TP5, TP8"
        assert label_range([Rank(tp=i, ep=i) for i in range(4)]) == "TP0-TP3"
        assert label_range([Rank(pp=p, tp=t) for p in (0, 1) for t in (0, 1)]) == "PP0 TP0-TP1, PP1 TP0-TP1"
        assert label_range([Rank(dp=i, tp=i, ep=i) for i in range(8)]) == "DP0 TP0 EP0 ... DP7 TP7 EP7 (8 ranks)"
        assert label_range([Rank(tp=0)] * 8) == "TP0 (8 ranks)"
        assert label_range([Rank(pid=5), Rank(pid=6)]) == "pid 5, pid 6"

    def test_the_header_breaks_between_its_parts(self):
        lines = text(hybrid(), width=60).splitlines()
        assert lines[0] == "SGLang 0.5.18 · Qwen3.8-27B-FP8 · 1 GPU · serving ·"
        assert lines[1] == "2026-09-09 11:57:18, 6 h of log, 1 start"


class TestFacts:
    def test_capacity_names_what_binds(self):
        assert (
            "330,323 KV tokens; 24 running requests (bound by state slots: 124 at 5 a request); context 262,144"
            in text(hybrid())
        )

    def test_vllm_speaks_of_blocks_and_of_its_budget(self):
        capacity = Capacity(
            kv_tokens=434912,
            kv_blocks=27182,
            kv_block_tokens=16,
            max_running_requests=256,
            concurrency=Concurrency(32768, 13.27),
        )
        budget = Budget(round(71.3 * 2**30), round(7.9 * 2**30), "total x 0.9")
        server = dense(
            framework="vllm", ranks=(dense_rank(capacity=capacity, budget=budget),), config={"memory_fraction": 0.9}
        )
        output = text(server, width=160)
        assert (
            "434,912 KV tokens; 27,182 blocks of 16 tokens; 256 running requests; 13.27 requests of 32,768 tokens at once"
            in output
        )
        assert re.search(r"^budget +71\.3 GiB allowed, 7\.90 GiB outside it: total x 0\.9$", output, re.MULTILINE)

    def test_engines_that_differ_are_listed(self):
        engines = (Engine(0, None, Capacity(kv_tokens=100)), Engine(1, None, Capacity(kv_tokens=200)))
        output = text(dense(engines=engines))
        assert "DP0: 100 KV tokens" in output
        assert "DP1: 200 KV tokens" in output

    def test_peaks(self):
        assert "at most 3 running, 0 queued; KV 12 %, state slots 12 %" in text(hybrid())

    def test_without_serving_lines_nothing_is_called_unused(self):
        output = text(hybrid(usage=Usage()))
        assert "no serving lines in the log" in output
        assert "never needed" not in output

    def test_failures_point_at_their_line(self):
        failure = Failure(
            "decode", "serving", {"requested_bytes": 2**20}, at(77, "torch.OutOfMemoryError: CUDA out of memory.")
        )
        output = text(dense(failures=(failure,)))
        assert "line 77: torch.OutOfMemoryError: CUDA out of memory." in output

    def test_a_failure_row_begins_with_the_exception_and_reaches_its_numbers(self):
        line = (
            "2026-03-10T22:25:00.000000032Z stdout F (Worker_TP1 pid=121) ERROR 03-10 22:27:01 [multiproc_executor.py:827] "
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.31 GiB. GPU 1 has a total capacity of 79.18 GiB "
            "of which 877.25 MiB is free. Including non-PyTorch memory, this process has 78.31 GiB memory in use. " * 3
        )
        output = text(dense(failures=(Failure("decode", "serving", {}, at(77, line[:400])),)), width=100)
        rows = output[output.index("failed ") :].splitlines()
        assert rows[0].startswith(
            "failed     line 77: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.31 GiB."
        )
        assert "877.25 MiB is free" in " ".join(rows[:3])
        assert sum(row.startswith("           ") for row in rows[1:]) <= 2

    def test_a_failure_row_is_not_the_head_of_a_traceback(self):
        head = Failure(
            "scheduler_exception",
            "pools",
            {},
            at(5, "[2026-09-20 02:00:23] Scheduler hit an exception: Traceback (most recent call last):"),
        )
        cause = Failure(
            "kv_too_small", "pools", {}, at(11, "ValueError: Loaded weights leave no room. Raise it above 0.677.")
        )
        output = text(dense(failures=(head, cause)))
        assert "line 11: ValueError: Loaded weights leave no room. Raise it above 0.677." in output
        assert "Traceback" not in output
        assert "Scheduler hit an exception: Traceback" in text(dense(failures=(head,)))

    def test_the_same_failure_of_several_ranks_is_one_row(self):
        failures = tuple(
            Failure(
                "decode",
                "serving",
                {"pid": tp},
                at(
                    70 + tp,
                    f"(Worker_TP{tp} pid={tp}) ERROR 03-10 22:27:01 [x.py:827] RuntimeError: rank {tp} is out of memory",
                ),
            )
            for tp in range(4)
        )
        output = text(dense(failures=failures), width=140)
        assert output.count("RuntimeError") == 1
        assert "line 70 and 3 more like it: RuntimeError: rank 0 is out of memory" in output

    def test_one_allocation_told_in_several_wordings_is_one_row(self):
        told = "CUDA out of memory. Tried to allocate 126.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 92.00 MiB is free."
        wordings = (f"torch.OutOfMemoryError: {told}", f"RuntimeError: Worker failed with error '{told}', see above")
        native = f"[E716 19:47:26.324588983 shim_common.cpp:523] Exception in aoti_torch: {told}"
        failures = tuple(Failure("decode", "serving", {}, at(7 + i, line)) for i, line in enumerate(wordings))
        assert text(dense(failures=failures), width=100).count("Tried to allocate") == 1
        assert "line 3: Exception in aoti_torch: CUDA out of memory." in text(
            dense(failures=(Failure("decode", "serving", {}, at(3, native)),))
        )

    def test_unread_lines_are_counted_and_shown_on_request(self):
        unread = Unrecognized(2, (Evidence(0, 5, "New pool: 3.50 GB"),))
        assert "2 memory-like lines not understood (--unrecognized)" in text(dense(), unrecognized=unread)
        shown = text(dense(), unrecognized=unread, options=Options(unrecognized=True))
        assert "line 5: New pool: 3.50 GB" in shown
        assert "... and 1 more" in shown

    def test_the_card_is_asked_for_only_where_it_would_tell_something(self):
        def advice(server, **options):
            return re.findall(r"^next +(.*)$", text(server, options=Options(**options), width=160), re.MULTILINE)

        assert advice(dense()) == ["memledger explain --gpu-total SIZE (the card's size or name)"]
        assert advice(dense(), gpu_total=True) == []
        named = dense(ranks=(dense_rank(gpu=Gpu(kind="cuda", name="NVIDIA GeForce RTX 4090")),))
        assert advice(named) == ["memledger explain --gpu-total 4090"]
        larger = dense(ranks=(dense_rank(opening=44.0, gpu=Gpu(kind="cuda", name="NVIDIA GeForce RTX 4090")),))
        assert advice(larger) == []
        host = Rank(tp=0, entries=(entry("host/kv_cache", gib(9.0), "logged"),))
        assert advice(dense(ranks=(host,))) == []

    def test_the_peaks_and_the_opening_have_their_lines(self):
        base = hybrid_rank()
        opened = msgspec.structs.replace(base, residual=msgspec.structs.replace(base.residual, evidence=at(23)))
        usage = msgspec.structs.replace(hybrid().usage, evidence=(*at(91), *at(349)))
        output = text(hybrid(ranks=(opened,), usage=usage), options=Options(evidence=True))
        assert re.search(r"^free at the start +78\.48 +100\.0% +23 ", output, re.MULTILINE)
        assert "line 23: text of line 23" in output
        assert "line 349: text of line 349" in output

    def test_evidence_prints_the_lines(self):
        assert "line 88: text of line 88" in text(hybrid(), options=Options(evidence=True))
        assert "line 88: text" not in text(hybrid())


class TestSeveralInputs:
    def test_a_line_number_names_its_input(self):
        base = dense_rank()
        moved = tuple(
            msgspec.structs.replace(e, evidence=tuple(Evidence(1, x.line, x.text) for x in e.evidence))
            for e in base.entries
        )
        server = dense(ranks=(msgspec.structs.replace(base, entries=moved),), span=(Span(0, 1, 9), Span(1, 1, 90)))
        output = text(server, paths=("node0.log", "node1.log"), options=Options(evidence=True))
        assert re.search(r"^weights .* logged +2:20$", output, re.MULTILINE)
        assert "inputs     1 node0.log, 2 node1.log" in output
        assert "node1.log:20: text of line 20" in output

    def test_ranges_of_lines(self):
        lines = [Evidence(0, i, "") for i in (88, 71, 74)]
        assert line_numbers(lines, many=False) == "71..88"
        assert line_numbers(lines, many=True) == "1:71..88"
        assert line_numbers([*lines, Evidence(1, 3, "")], many=True) == "1:71..2:3"
        assert line_numbers(lines[:2], many=False) == "71,88"
        assert line_numbers([], many=True) == ""


class TestStarts:
    def starts(self):
        return (
            dense(state="stopped", span=(Span(0, 1, 90),)),
            dense(state="failed", ranks=(), span=(Span(0, 91, 95),), started_at="2026-01-02T03:04:05"),
            hybrid(span=(Span(0, 96, 900),)),
        )

    def test_the_last_start_with_a_ledger_is_shown_and_the_others_have_a_line_each(self):
        output = text(*self.starts())
        assert "start 3 of 3" in output
        assert re.search(r"^1  line 1  SGLang 0\.4\.6  Dense-7B  stopped$", output, re.MULTILINE)
        assert re.search(r"^2  2026-01-02 03:04:05  SGLang 0\.4\.6  Dense-7B  failed$", output, re.MULTILINE)

    def test_a_last_start_that_failed_is_what_the_reader_came_for(self):
        failed = dense(state="failed", ranks=(), failures=(Failure("weights", "weights"),))
        assert choose_servers(report(hybrid(), failed), Options()) == [1]

    def test_a_bare_last_start_gives_way_to_one_that_tells_something(self):
        assert choose_servers(report(hybrid(), dense(ranks=())), Options()) == [0]

    def test_two_servers_at_once_are_both_shown(self):
        output = text(dense(label="chat-1"), hybrid(label="embed-1"))
        assert "start 1 of 2" in output
        assert "start 2 of 2" in output
        assert "other starts" not in output

    def test_all_starts_and_one_start(self):
        assert text(*self.starts(), options=Options(all_starts=True)).count("start ") >= 3
        assert "start 1 of 3" in text(*self.starts(), options=Options(start=1))
        with pytest.raises(LookupError, match="no start 4: the input holds 3 starts"):
            text(*self.starts(), options=Options(start=4))

    def test_a_start_without_memory_lines(self):
        assert "No line gives the size of an allocation in this start." in text(dense(ranks=()))


class TestHost:
    def test_host_memory_is_a_table_of_its_own_and_no_part_of_the_gpu(self):
        base = dense_rank()
        server = dense(
            ranks=(
                msgspec.structs.replace(
                    base, entries=(*base.entries, entry("host/kv_cache", gib(20.0), "logged", evidence=at(60)))
                ),
            )
        )
        output = text(server)
        assert "host memory, GPU 0" in output
        assert re.search(r"^KV cache +20\.00 +100\.0% +logged +60", output, re.MULTILINE)
        assert re.search(r"^free at the start +23\.50", output, re.MULTILINE)

    def test_a_cpu_server_has_only_a_host_table(self):
        entries = (entry("host/kv_cache", gib(4.0), "logged"),)
        server = dense(ranks=(Rank(tp=0, entries=entries, gpu=Gpu(kind="cpu")),))
        output = text(server)
        assert "1 CPU worker" in output
        assert "The server runs on the CPU; in host memory it keeps the KV cache 4.00 GiB." in output
        assert "GPU 0" not in output


class TestOutput:
    @pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
    def test_no_line_is_wider_than_asked(self, width):
        longest = max(len(line) for line in text(hybrid(), dense(), width=width).splitlines())
        assert longest <= max(width, 56)

    def test_ascii_where_the_output_can_show_no_more(self):
        output = text(hybrid(), style=Style(100, unicode=False))
        assert output.isascii()
        assert re.search(r"^weights +#+ +28\.47", output, re.MULTILINE)
        assert "+-0.0" in output

    def test_colour_only_where_wanted(self):
        assert "\x1b[" not in text(hybrid())
        coloured = text(hybrid(), style=Style(100, colour=True))
        assert re.sub(r"\x1b\[\d+m", "", coloured) == text(hybrid(), width=100)

    def test_nothing_from_the_log_reaches_the_terminal_raw(self):
        evil = "\x1b]0;title\x07\x1b[31mred\u202e"
        server = dense(
            model=evil,
            label=evil,
            notes=(evil,),
            failures=(Failure("decode", "serving", {}, at(3, evil)),),
            ranks=(dense_rank(gpu=Gpu(name=evil)),),
        )
        output = text(server, options=Options(evidence=True))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", output)

    def test_secrets_are_masked(self):
        server = dense(failures=(Failure("decode", "serving", {}, at(3, "--api-key sk-verysecret123456")),))
        assert "verysecret" not in text(server, options=Options(evidence=True))

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("org/Dense-7B", "Dense-7B"),
            ("/root/hub/models--org--Name-1B/snapshots/0a1b2c", "Name-1B"),
            ("/models/x/", "x"),
            ("/hub/org/Name/snapshots/" + "0a" * 20, "Name"),
            ("/kaggle/input/qwen/8b/1", "8b/1"),
            ("0a" * 20, "0a" * 20),
            ("", None),
            (None, None),
        ],
    )
    def test_a_model_is_called_by_the_telling_part_of_its_path(self, path, name):
        assert model_name(path) == name


def test_every_account_has_a_label():
    from memledger.ledger import ACCOUNTS
    from memledger.report.view import ACCOUNT_LABELS

    assert {a.partition("/")[0] for a in ACCOUNTS} == set(ACCOUNT_LABELS)


def fixture_logs():
    return sorted(path for path in FIXTURES.glob("*/server*.log") if path.parent.name != "hostile")


@pytest.mark.parametrize("log", fixture_logs(), ids=lambda path: path.parent.name)
def test_the_report_of_a_fixture_log_is_the_golden_one(log, update_golden):
    """`pytest --update-golden` writes the reports anew; read the difference before you commit it."""
    from memledger.pipeline import explain

    shown = findings.attach(explain([str(log)]))
    got = render(shown, Options(all_starts=True, unrecognized=True, command="memledger explain server.log"), Style(110))
    golden = log.parent / ("report.txt" if log.name == "server.log" else log.stem + ".report.txt")
    if update_golden:
        golden.write_text(got, encoding="utf-8")
    assert golden.is_file(), f"{golden} is missing: pytest --update-golden writes it"
    assert got == golden.read_text(encoding="utf-8")


def test_there_are_fixture_logs_of_both_engines():
    names = {path.parent.name.partition("-")[0] for path in fixture_logs()}
    assert {"sglang", "vllm"} <= names
    assert len(fixture_logs()) >= 12
