"""The pure core of `memledger sweep`: steps, prompts, intervals, streams, verdicts, and the results file."""

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.live.sample import Metrics
from memledger.report import sweep_view
from memledger.sweep import journal, judge
from memledger.sweep.figures import distribution, growth, quantile, ranks
from memledger.sweep.prompts import LEAST_IDS, IdPrompts, PromptError, TextPrompts, next_guess, texts_of
from memledger.sweep.runner import below_floor, expected_free
from memledger.sweep.steps import Purse, Slo, Step, counts, seconds, slo, steps
from memledger.sweep.stream import Events, ServerSaysError, StreamError, piece
from memledger.sweep.values import (
    Begun,
    Ended,
    Look,
    Looked,
    Memory,
    NotRun,
    Outcome,
    Sent,
    Settings,
    StepBegun,
    StepEnded,
    Target,
    Totals,
)


class TestSteps:
    def test_the_smallest_first_and_each_once(self):
        assert steps([64, 8, 8], [4, 1]) == (Step(8, 1), Step(8, 4), Step(64, 1), Step(64, 4))

    def test_counts_and_times_as_people_write_them(self):
        assert counts("8k,32k, 100") == (8192, 32768, 100)
        assert [seconds(t) for t in ("60s", "50ms", "4h", "1.5m", "7")] == [60, 0.05, 14400, 90, 7]
        assert slo("ttft=2s,tpot=50ms") == Slo(2.0, 0.05)
        assert slo("tpot=50ms") == Slo(None, 0.05)

    @pytest.mark.parametrize("text", ["", "0", "1,,2", "-4", "4x", "1e3"])
    def test_what_is_no_count_is_refused(self, text):
        with pytest.raises(ValueError, match="count"):
            counts(text)

    @pytest.mark.parametrize("text", ["", "0s", "-1s", "fast", "1e9s", "nan"])
    def test_what_is_no_time_is_refused(self, text):
        with pytest.raises(ValueError, match="time"):
            seconds(text)

    @pytest.mark.parametrize("text", ["ttft", "ttft=", "e2e=2s", "ttft=1s,ttft=2s", "ttft=1s;tpot=2s"])
    def test_what_is_no_limit_is_refused(self, text):
        with pytest.raises(ValueError, match=r"ttft=2s|time"):
            slo(text)

    def test_the_cap_on_tokens_counts_what_is_still_running(self):
        purse = Purse(100)
        assert purse.take(60)
        assert not purse.take(41)
        purse.settle(60, 50)
        assert purse.take(50)
        assert not purse.take(1)
        purse.settle(50, None)
        assert purse.spent == 100


class TestFigures:
    def test_quantiles_are_nearest_rank(self):
        values = [float(v) for v in range(1, 101)]
        assert quantile(values, 0.5).value == 50
        assert quantile(values, 0.99).value == 99
        assert quantile([7.0], 0.99).value == 7

    def test_an_end_that_so_few_values_do_not_bound_is_unknown(self):
        assert ranks(367, 0.99)[1] is None
        assert ranks(368, 0.99)[1] == 368
        assert ranks(5, 0.5) == (None, None)
        assert ranks(6, 0.5) == (1, 6)
        assert quantile([1.0, 2.0], 0.5).low is None

    @given(n=st.integers(1, 60), p=st.sampled_from([0.1, 0.5, 0.9]))
    def test_the_ranks_are_those_of_exact_arithmetic(self, n, p):
        mass = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        low, high = ranks(n, p)
        fits_low = [k for k in range(1, n + 1) if sum(mass[:k]) <= 0.025 + 1e-12]
        fits_high = [k for k in range(1, n + 1) if sum(mass[k:]) <= 0.025 + 1e-12]
        assert low == max(fits_low, default=None)
        assert high == min(fits_high, default=None)

    def test_the_interval_holds_the_true_median_as_often_as_it_says(self):
        source, held = random.Random(7), 0
        for _ in range(1000):
            found = quantile(sorted(source.expovariate(1) for _ in range(40)), 0.5)
            held += found.low <= 0.6931 <= found.high
        assert 940 <= held <= 990  # 96.2 % by the binomial distribution of 40; one standard deviation is 6

    def test_no_values_no_figures(self):
        assert distribution([]) is None
        assert distribution([2.0, 4.0]).mean == 3

    @given(token=st.integers(1, 10**6), request=st.integers(0, 10**9))
    def test_growth_finds_bytes_of_tokens_and_of_requests(self, token, request):
        points = [(r, t, float(r * (request + token * t))) for r in (1, 4) for t in (1000, 9000)]
        found = growth(points)
        assert found.per_token == pytest.approx(token, rel=1e-6)
        assert found.per_request == pytest.approx(request, rel=1e-6, abs=token / 10)
        assert found.misfit <= 1e-6 * max(y for *_, y in points)

    def test_one_length_of_context_tells_tokens_and_requests_not_apart(self):
        assert growth([(1, 1000, 5.0), (4, 1000, 20.0)]) is None


class TestPrompts:
    IDS = list(range(100, 140)) * 3

    @given(seed=st.integers(1, 2**31), tokens=st.integers(16, 400))
    def test_the_length_is_exact_and_no_two_begin_alike(self, seed, tokens):
        prompts = IdPrompts(self.IDS, seed)
        made = [prompts.make(tokens) for _ in range(50)]
        assert {len(p) for p in made} == {tokens}
        assert len({tuple(p[:16]) for p in made}) == 50
        assert {token for p in made for token in p} <= set(self.IDS)

    def test_another_run_begins_otherwise(self):
        first, second = (IdPrompts(self.IDS, seed).make(64)[:16] for seed in (11, 12))
        assert first != second

    def test_a_shared_beginning_is_shared_and_the_rest_is_not(self):
        prompts = IdPrompts(self.IDS, 5, shared=0.75)
        made = [prompts.make(100) for _ in range(10)]
        assert {len(p) for p in made} == {100}
        assert len({tuple(p[:75]) for p in made}) == 1
        assert len({tuple(p[:80]) for p in made}) == 10

    def test_prompts_too_short_to_differ_are_refused(self):
        prompts = IdPrompts(self.IDS, 5)
        with pytest.raises(PromptError, match="too short"):
            for _ in range(100):
                prompts.make(1)

    def test_too_few_tokens_are_refused(self):
        with pytest.raises(PromptError, match="--dataset"):
            IdPrompts(range(LEAST_IDS - 1), 1)

    def test_words_are_found_by_the_servers_count(self):
        def tokens(words):
            return 7 + words + words // 3

        tried = []
        while (words := next_guess(1000, tried)) is not None and len(tried) < 6:
            tried.append((words, tokens(words)))
        assert min(abs(t - 1000) for _, t in tried) <= 1

    def test_prompts_of_words_differ_and_have_the_length_that_was_learnt(self):
        prompts = TextPrompts("one two three four five six seven eight nine ten a b c d e f", 3)
        prompts.learn(100, 42)
        made = [prompts.make(100) for _ in range(20)]
        assert {len(p.split()) for p in made} == {42}
        assert len({p.split()[0] for p in made}) == 20

    def test_data_may_be_text_or_json_lines(self):
        import json

        assert texts_of("plain\ntext", json.loads) == "plain\ntext"
        lines = (
            '{"id": "a", "prompt": "the longest text"}\n{"messages": [{"role": "user", "content": "hello there"}]}\n'
        )
        assert texts_of(lines, json.loads).splitlines()[0] == "the longest text"
        assert "hello there" in texts_of(lines, json.loads)


class TestStream:
    @given(st.lists(st.integers(1, 9), min_size=1), st.sampled_from([b"\n", b"\r\n"]))
    def test_events_are_the_same_however_the_bytes_are_cut(self, cuts, end):
        whole = b"".join(
            [b"data: one", end, end, b": ping", end, b"event: x", end, b"data:two", end, b"data: 2", end, end]
        )
        events, found, at = Events(), [], 0
        for cut in cuts * len(whole):
            found += events.feed(whole[at : at + cut])
            at += cut
        assert found == [b"one", b"two\n2"]

    def test_a_line_without_end_is_refused(self):
        events = Events()
        with pytest.raises(StreamError, match="longer"):
            for _ in range(20):
                list(events.feed(b"data: " + b"x" * 100_000))

    def test_an_event_of_endless_lines_is_refused(self):
        events = Events()
        with pytest.raises(StreamError, match="longer"):
            for _ in range(20):
                list(events.feed(b"data: " + b"x" * 100_000 + b"\n"))

    def test_pieces(self):
        assert piece(b'{"choices": [{"text": ""}]}').has_tokens
        assert not piece(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}').has_tokens
        assert piece(b'{"choices": [], "usage": {"prompt_tokens": 3}}').usage.prompt_tokens == 3

    @pytest.mark.parametrize(
        "data", [b"", b"[]", b"[" * 10_000, b'{"choices": 4}', b"\xff", b'{"usage": {"prompt_tokens": "x"}}']
    )
    def test_what_is_no_piece_is_refused(self, data):
        with pytest.raises(StreamError):
            piece(data)

    def test_an_error_in_the_stream_is_told_clean(self):
        with pytest.raises(ServerSaysError, match="no memory") as found:
            piece(b'{"error": {"message": "no memory \\u001b[2J api_key=sk-abcdefghijklmnop1234"}}')
        assert "\x1b" not in str(found.value)
        assert "sk-abc" not in str(found.value)


SETTINGS = Settings("http://127.0.0.1:1", (100, 300), (1, 2), 11, 60.0, slo=Slo(1.0, 0.1), gpu_hour=2.0, gpus=2)


def outcome(at, first=0.5, each=0.1, tokens=11, prompt=100, **more):
    last = first + each * (tokens - 1)
    return Outcome(at, last, first, last, each, tokens, prompt, tokens, **more)


def look(phase, clock, **more):
    return Looked(Look(phase, clock, "2026-01-01T00:00:00+00:00", **more))


def metrics(running=1, queued=0, kv=0.5):
    return Metrics(running_requests=running, queued_requests=queued, kv_usage=kv)


def a_step(step, outcomes, looks=(), *, stopped=None, lag=0.001):
    return [StepBegun(step, 0.0), *looks, *(Sent(o) for o in outcomes), StepEnded(9.0, stopped, lag)]


TARGET = Target(pool_bytes=1000)


def swept(*events, settings=SETTINGS, target=TARGET):
    return judge.sweep([Begun("1", "2026-01-01T00:00:00+00:00", settings, target), *events])


class TestJudge:
    def test_times_and_rates_of_a_step(self):
        one = swept(*a_step(Step(100, 1), [outcome(0.0), outcome(1.5)])).steps[0]
        assert (one.verdict, one.requests, one.exact) == ("stable", 2, True)
        assert one.ttft_s.p50.value == 0.5
        assert one.tpot_s.p50.value == pytest.approx(0.1)
        assert one.decode_tokens_per_s.p50.value == pytest.approx(10)
        assert one.window_s == pytest.approx(3.0)
        assert one.requests_per_s == pytest.approx(2 / 3)
        assert one.output_tokens_per_s == pytest.approx(22 / 3)
        # 2 GPUs at 2.0 an hour, over 7.33 tokens a second.
        assert one.cost_per_million_output == pytest.approx(2 * 2.0 / (22 / 3 * 3600) * 1e6)

    def test_a_request_that_failed_fails_the_step_and_is_no_part_of_its_times(self):
        bad = Outcome(0.0, 30.0, error="http_5xx", status=503, reason="status 503: gone")
        one = swept(*a_step(Step(100, 1), [outcome(0.0), bad])).steps[0]
        assert (one.verdict, one.requests, one.failed, one.errors) == ("failed", 1, 1, {"http_503": 1})
        assert one.ttft_s.count == 1
        assert one.error_text == "status 503: gone"

    def test_warm_ups_and_cancelled_requests_are_no_part_of_the_figures(self):
        events = a_step(Step(100, 1), [outcome(0.0), Outcome(0.0, 40.0, error="cancelled")], stopped="interrupted")
        events.insert(1, Sent(outcome(0.0, first=9.0), warm_up=True))
        one = swept(*events).steps[0]
        assert (one.verdict, one.requests, one.failed) == ("stopped", 1, 0)
        assert one.ttft_s.largest == 0.5
        assert one.window_s == pytest.approx(1.5)

    def test_waiting_most_of_the_time_is_no_stable_step(self):
        busy = [look("during", i, metrics=metrics(2, q)) for i, q in enumerate([1, 3, 0, 2])]
        one = swept(*a_step(Step(100, 8), [outcome(0.0)], busy)).steps[0]
        assert (one.verdict, one.usage.running, one.usage.queued) == ("queued", 2, 3)
        idle = [look("during", i, metrics=metrics(2, q)) for i, q in enumerate([1, 0, 0, 0])]
        assert swept(*a_step(Step(100, 8), [outcome(0.0)], idle)).steps[0].verdict == "stable"

    def test_the_servers_counters_tell_preemptions_and_others(self):
        looks = [
            look("before", 0, totals=Totals(requests=10, preemptions=1, first_tokens=10, first_token_sum_s=5.0)),
            look("after", 9, totals=Totals(requests=14, preemptions=3, first_tokens=14, first_token_sum_s=7.0)),
        ]
        one = swept(*a_step(Step(100, 1), [outcome(0.0)], looks)).steps[0]
        assert one.verdict == "preempted"
        assert (one.counted.requests, one.counted.others, one.counted.ttft_mean_s) == (4, 3, 0.5)

    def test_a_counter_that_went_back_tells_nothing(self):
        assert Totals(requests=3).since(Totals(requests=9)).requests is None
        assert Totals(requests=3).since(Totals()).requests is None

    def test_tokens_that_are_not_believed_give_no_rate_and_no_cost(self):
        doubted = Outcome(0.0, 1.5, 0.5, 1.5, 0.1, 11, 100, None, doubt="the usage says 99 output tokens of at most 11")
        one = swept(*a_step(Step(100, 1), [outcome(0.0), doubted])).steps[0]
        assert (one.output_tokens_per_s, one.cost_per_million_output, one.meets_slo) == (None, None, "not_known")
        assert one.doubts == ("the usage says 99 output tokens of at most 11",)

    def test_a_client_that_was_late_tells_no_time_per_token(self):
        quick = [outcome(float(at), each=0.00001) for at in range(3)]
        found = swept(*a_step(Step(100, 1), quick, lag=0.3))
        one = found.steps[0]
        assert (one.tpot_s, one.decode_tokens_per_s, one.meets_slo) == (None, None, "not_known")
        assert one.ttft_s.p50.value == 0.5
        (doubt,) = one.doubts
        assert doubt.startswith("the time per token is not told, since memledger itself was up to 300 ms late")
        assert "***" not in " ".join(sweep_view.remarks(found))
        assert (
            "Whether a step keeps a 99th percentile of TTFT 1 s and time per token 0.1 s is not known."
            in sweep_view.conclusions(found)
        )

    def test_a_late_clients_time_to_the_first_token_is_an_upper_bound_beside_the_servers_own(self):
        looks = [
            look("before", 0, totals=Totals(requests=1, first_tokens=1, first_token_sum_s=1.0)),
            look("after", 9, totals=Totals(requests=2, first_tokens=2, first_token_sum_s=1.125)),
        ]
        late = swept(*a_step(Step(100, 1), [outcome(0.0)], looks, lag=0.2))
        assert sweep_view.step_row(late.steps[0])[3:5] == ["<0.5", "<0.5"]
        assert (
            "100 x 1: TTFT is an upper bound, as memledger itself was up to 200 ms late; the server's own mean is 0.125 s"
            in sweep_view.remarks(late)
        )
        prompt = swept(*a_step(Step(100, 1), [outcome(0.0)], looks))
        assert sweep_view.step_row(prompt.steps[0])[3:5] == ["0.5", "0.5"]
        assert not any("upper bound" in remark for remark in sweep_view.remarks(prompt))

    def test_a_client_that_was_late_by_less_than_it_measures_tells_it(self):
        one = swept(*a_step(Step(100, 1), [outcome(0.0)], lag=0.2)).steps[0]
        assert one.tpot_s.p50.value == pytest.approx(0.1)
        assert one.doubts == ()

    def test_a_prompt_of_another_length_is_told(self):
        one = swept(*a_step(Step(100, 1), [outcome(0.0), outcome(2.0, prompt=101)])).steps[0]
        assert (one.exact, one.prompt_tokens) == (False, (100, 101))

    def test_the_answers_are_the_largest_steps_that_held(self):
        sweep = swept(
            *a_step(Step(100, 1), [outcome(0.0)]),
            *a_step(Step(100, 2), [outcome(0.0), outcome(0.0)]),
            *a_step(Step(300, 1), [outcome(0.0, first=3.0, prompt=300)]),
            *a_step(Step(300, 2), [Outcome(0.0, 1.0, error="broken_off", reason="x")]),
            Ended("2026-01-01T00:01:00+00:00", "300 x 2 failed: x"),
        )
        answers = sweep.answers
        assert (answers.longest_context, answers.most_concurrency) == (Step(300, 1), Step(100, 2))
        assert (answers.best_at_slo, answers.concurrency_per_gpu) == (Step(100, 2), 1.0)
        assert [s.meets_slo for s in sweep.steps] == ["yes", "yes", "no", "not_known"]
        assert (sweep.complete, sweep.ended) == (False, "300 x 2 failed: x")

    def test_use_of_the_pool_is_set_against_the_models_arithmetic(self):
        def full(context, requests):
            # A pool of 1,000,000 bytes; 8 bytes a token, 500 of state a request.
            kv = requests * ((context + 11) * 8 + 500) / 1e6
            looks = [look("during", 1, metrics=metrics(requests, 0, kv))]
            return a_step(Step(context, requests), [outcome(0.0, prompt=context)] * requests, looks)

        target = Target("vllm", pool_bytes=1_000_000, bytes_per_token=8.0, state_bytes_per_request=500)
        told = swept(*full(100, 1), *full(100, 2), *full(300, 2), target=target).growth[0]
        assert (told.unit, told.model_per_token, told.model_per_request) == ("bytes", 8.0, 500)
        assert told.measured.per_token == pytest.approx(8.0)
        assert told.measured.per_request == pytest.approx(500)
        # SGLang's state is in a pool of its own: nothing of it is to be found here.
        own = Target("sglang", pool_bytes=1_000_000, bytes_per_token=8.0, state_bytes_per_request=500)
        assert swept(*full(100, 1), *full(300, 2), target=own).growth[0].model_per_request is None

    def test_steps_that_did_not_all_run_at_once_tell_nothing_of_growth(self):
        looks = [look("during", 1, metrics=metrics(1, 0, 0.5))]
        steps = [a_step(Step(c, 2), [outcome(0.0, prompt=c)], looks) for c in (100, 300)]
        assert swept(*steps[0], *steps[1]).growth == ()

    def test_memory_before_at_its_peak_and_after(self):
        looks = [
            look("before", 0, memory=Memory({"free": 50}, 100, 50, 200)),
            look("during", 1, memory=Memory({}, 140, 10, 200)),
            look("after", 2, memory=Memory({"free": 30}, 120, 30, 200)),
        ]
        told = swept(*a_step(Step(100, 1), [outcome(0.0)], looks)).steps[0].memory
        assert (told.before, told.peak, told.after, told.least_free) == (100, 140, 120, 10)
        assert (told.accounts_before, told.accounts_after) == ({"free": 50}, {"free": 30})

    def test_a_soak_that_leaks_is_told_with_its_rate(self):
        looks = [look("during", float(i * 10), memory=Memory(server_bytes=2**30 + i * 2**20)) for i in range(200)]
        events = [StepBegun(Step(100, 1), 0.0, soak=True), *looks, Sent(outcome(0.0)), StepEnded(2000.0)]
        trend = swept(*events).soak[0]
        assert trend.verdict == "growing"
        assert trend.per_hour == pytest.approx(360 * 2**20, rel=0.01)

    def test_a_step_that_was_not_run_says_why(self):
        one = swept(NotRun(Step(100, 1), "the server takes 50 tokens")).steps[0]
        assert (one.verdict, one.reason, one.requests) == ("not_run", "the server takes 50 tokens", 0)


class TestFloor:
    def test_a_device_below_the_floor_stops(self):
        low = Look("during", 0.0, "", memory=Memory(free_bytes=2**29))
        assert "below the floor" in below_floor(low, 2**30)
        assert below_floor(low, 2**28) is None
        assert below_floor(Look("during", 0.0, ""), 2**30) is None

    def test_the_host_counts_where_there_is_no_device(self):
        assert "host memory" in below_floor(Look("during", 0.0, "", memory=Memory(host_available_bytes=1)), 2**30)

    def test_free_memory_is_expected_along_the_last_two_loads(self):
        assert expected_free([(100, 1000), (200, 900)], 400) == 700
        assert expected_free([(100, 900), (200, 1000)], 400) == 1000
        assert expected_free([(100, 1000)], 400) is None
        assert expected_free([(100, 1000), (200, 900), (200, 850)], 200) == 850


EVENTS = [
    Begun("1", "2026-01-01T00:00:00+00:00", SETTINGS, Target("vllm", model="m")),
    *a_step(Step(100, 1), [outcome(0.0)], [look("during", 1.0, metrics=metrics())]),
    Ended("2026-01-01T00:01:00+00:00"),
]


class TestJournal:
    def test_what_is_written_is_read(self, tmp_path):
        writer = journal.Writer(tmp_path / "r.jsonl")
        for one in EVENTS:
            writer.write(one)
        writer.close()
        events, notes = journal.read(tmp_path / "r.jsonl")
        assert (events, notes) == (EVENTS, ())
        assert journal.is_results((tmp_path / "r.jsonl").read_bytes()[:4096])

    def test_every_cut_of_the_file_is_read_up_to_its_last_whole_line(self):
        data = b"".join(map(journal.line_of, EVENTS))
        first = data.index(b"\n") + 1
        for cut in range(first, len(data)):
            events, notes = journal.decoded(data[:cut], "r")
            whole = data[:cut].count(b"\n")
            assert events == EVENTS[:whole]
            assert bool(notes) == (data[cut - 1 : cut] != b"\n")
            assert not judge.sweep(events, notes).complete

    def test_a_damaged_line_is_said(self):
        data = [journal.line_of(one) for one in EVENTS]
        data[2] = b"\xff{not json\n"
        events, notes = journal.decoded(b"".join(data), "r")
        assert len(events) == len(EVENTS) - 1
        assert "1 damaged" in notes[0]

    @pytest.mark.parametrize("data", [b"", b"{}\n", b'{"kind":"end","at":"x"}\n', b"[" * 10_000 + b"\n"])
    def test_another_file_is_refused(self, data):
        with pytest.raises(journal.JournalError, match="no results file"):
            journal.decoded(data, "r")

    def test_another_version_is_refused(self):
        begun = Begun("9", "x", SETTINGS, Target(), schema="memledger-sweep/9")
        with pytest.raises(journal.JournalError, match="another version"):
            journal.decoded(journal.line_of(begun), "r")

    def test_no_file_is_written_over(self, tmp_path):
        (tmp_path / "r.jsonl").write_text("mine")
        with pytest.raises(journal.JournalError, match="there already"):
            journal.Writer(tmp_path / "r.jsonl")
        assert (tmp_path / "r.jsonl").read_text() == "mine"

    def test_secrets_and_escapes_do_not_reach_the_file(self):
        bad = Sent(Outcome(0.0, 1.0, error="http_4xx", reason="bad \x1b[2J api_key=sk-abcdefghijklmnop1234"))
        assert b"sk-abc" not in journal.line_of(bad)
        assert b"\\u001b" not in journal.line_of(bad)
