"""Serving lines over time: every burst is kept, however long the log, and nothing of another server is taken in."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from memledger import history
from memledger.grammar import load_rules
from memledger.history import MOST_BUCKETS, NO_SERVING_LINE, History, Sample, look_again, thinned
from memledger.pipeline import explain

FIXTURES = Path(__file__).parent.parent / "fixtures"
START = "".join(
    f"[2026-09-09 11:57:{second} TP0] {message}\n"
    for second, message in (
        (30, "Load weight begin. avail mem=78.48 GB"),
        (40, "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.00 GB, mem usage=16.48 GB."),
        (41, "KV Cache is allocated. #tokens: 400000, K size: 20.00 GB, V size: 20.00 GB"),
        (
            50,
            "max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=64, context_len=32768, available_gpu_mem=20.00 GB",
        ),
    )
)


def decode(second, running, share, queued=0, rank="TP0"):
    at = datetime(2026, 9, 9, 12) + timedelta(seconds=second)
    return (
        f"[{at:%Y-%m-%d %H:%M:%S} {rank}] Decode batch. #running-req: {running}, #token: {int(share * 400000)}, "
        f"token usage: {share:.2f}, cuda graph: True, gen throughput (token/s): 100.00, #queue-req: {queued}\n"
    )


@pytest.fixture(scope="module")
def rules():
    return load_rules()


def looked(path, rules):
    report = explain([str(path)])
    return report, look_again(report, rules)


@pytest.mark.parametrize(
    "name", ["demo", "sglang-0.4.6-dense-tp8", "sglang-0.5.10-swa-eagle", "vllm-0.31-tp2", "vllm-0.6.4-v0"]
)
def test_the_largest_of_each_figure_is_the_reports_peak(name, rules):
    report, found = looked(FIXTURES / name / "server.log", rules)
    assert found.missing == {}
    (track,) = found.tracks[0]
    use = report.servers[0].usage
    for figure, peak in (
        ("running", use.peak_running_requests),
        ("queued", use.peak_queued_requests),
        ("kv", use.peak_kv_usage),
        ("state", use.peak_state_usage),
        ("swa", use.peak_swa_usage),
    ):
        told = [value for sample in track.samples if (value := getattr(sample, figure)) is not None]
        assert max(told, default=None) == (pytest.approx(peak) if peak is not None else None)


def test_each_scheduler_has_a_track_of_its_own(rules):
    _, found = looked(FIXTURES / "sglang-0.4.10-mla-dp-attention" / "server.log", rules)
    assert [track.name for track in found.tracks[0]] == [f"DP{i}" for i in range(8)]


def test_a_burst_of_one_line_among_a_hundred_thousand_is_there(tmp_path, rules):
    log = tmp_path / "long.log"
    bursts = {31_111: (50, 0.80, 0), 77_777: (40, 0.70, 9)}
    with log.open("w") as file:
        file.write(START)
        file.writelines(decode(i, *bursts.get(i, (3, 0.10, 0))) for i in range(100_000))
    _, found = looked(log, rules)
    (track,) = found.tracks[0]
    assert len(track.samples) <= 6 * MOST_BUCKETS + 1
    seen = {(s.running, s.kv, s.queued) for s in track.samples}
    assert {(50, 0.8, 0), (40, 0.7, 9)} <= seen
    assert track.seconds[-1] == 99_999
    at = [(seconds, s.running) for seconds, s in zip(track.seconds, track.samples, strict=True)]
    assert (31_111, 50) in at


def test_of_a_small_log_every_serving_line_is_there(tmp_path, rules):
    log = tmp_path / "small.log"
    log.write_text(START + "".join(decode(i, 30 - i, 0.3) for i in range(30)))
    _, found = looked(log, rules)
    assert [s.running for s in found.tracks[0][0].samples] == list(range(30, 0, -1))


def test_times_that_go_back_are_no_axis(tmp_path, rules):
    log = tmp_path / "a.log"
    log.write_text(START + decode(10, 1, 0.1) + decode(5, 2, 0.2) + decode(20, 3, 0.3))
    _, found = looked(log, rules)
    (track,) = found.tracks[0]
    assert [s.running for s in track.samples] == [1, 2, 3]
    assert track.seconds is None


def test_each_start_has_its_own_lines(tmp_path, rules):
    log = tmp_path / "a.log"
    again = START.replace("11:57", "13:57")
    log.write_text(START + decode(0, 5, 0.5) + decode(1, 5, 0.5) + again + decode(9000, 7, 0.7))
    report, found = looked(log, rules)
    assert len(report.servers) == 2
    assert [[s.running for s in found.tracks[i][0].samples] for i in (0, 1)] == [[5, 5], [7]]


def test_without_serving_lines_or_a_file_it_says_why(tmp_path, rules):
    log = tmp_path / "a.log"
    log.write_text(START)
    assert looked(log, rules)[1].missing == {0: NO_SERVING_LINE}
    log.write_text(START + decode(0, 1, 0.1))
    report = explain([str(log)])
    log.unlink()
    assert "second time" in look_again(report, rules).missing[0]


def test_a_log_that_was_rotated_in_between_tells_nothing_wrong(tmp_path, rules):
    log = tmp_path / "a.log"
    log.write_text(START + decode(0, 1, 0.1) + decode(1, 2, 0.2))
    report = explain([str(log)])
    log.write_text("")
    assert look_again(report, rules) == History({}, {0: "its log does not say any more what was read"})
    log.write_text(START + decode(0, 7, 0.7) + decode(1, 9, 0.9))
    assert look_again(report, rules).tracks == {}


class TestThinning:
    def test_few_samples_stay_as_they_are(self):
        samples = [Sample(0, i, None, running=i) for i in range(10)]
        assert thinned(samples) == samples

    def test_every_bucket_keeps_its_first_and_its_peaks_and_the_last_stays(self):
        samples = [Sample(0, i, None, running=1, kv=0.1) for i in range(1000)]
        samples[505] = Sample(0, 505, None, running=9, kv=0.1)
        samples[506] = Sample(0, 506, None, running=1, kv=0.9)
        kept = [s.line for s in thinned(samples, buckets=10)]
        assert kept == [0, 100, 200, 300, 400, 500, 505, 506, 600, 700, 800, 900, 999]


def test_blocks_are_cut_without_losing_a_byte():
    blocks = [b"abc", b"", b"defghij", b"k"]
    for size in (1, 2, 3, 100):
        pieces = list(history._stretches(blocks, size))
        assert b"".join(pieces) == b"abcdefghijk"
