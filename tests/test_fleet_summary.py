"""What the table sums up: latest starts, each incident once, the largest first."""

from memledger.fleet.summary import Summarizer, group_value


def row(file, model="a", rank="TP0", start=1, **more):
    return {
        "file": file, "status": "ok", "starts": 1, "start": start, "latest": True, "framework": "vllm",
        "model": model, "rank": rank, "oom_kinds": [], **more,
    }  # fmt: skip


def summed(*files, by=("model",), top=10):
    summarizer = Summarizer(by, top)
    for rows in files:
        summarizer.add(rows)
    return summarizer.summary()


def test_sums_are_over_ranks_and_count_those_that_tell():
    found = summed(
        [row("1", idle_state_bytes=5, kv_never_used_bytes=7), row("1", rank="TP1", idle_state_bytes=6)],
        [row("2", kv_never_used_bytes=1)],
    ).total
    assert (found.logs, found.ranks) == (2, 3)
    assert (found.idle_state_bytes, found.idle_state_known) == (11, 2)
    assert (found.kv_never_used_bytes, found.kv_never_used_known) == (8, 2)
    assert found.unexplained_known == 0


def test_an_earlier_start_of_the_same_server_adds_its_incidents_and_no_bytes():
    early = row("1", start=1, latest=False, kv_never_used_bytes=100, oom_kinds=["prefill"])
    late = row("1", start=2, kv_never_used_bytes=1, oom_kinds=["weights"])
    found = summed([early, late]).total
    assert (found.logs, found.ranks, found.kv_never_used_bytes) == (1, 1, 1)
    assert found.oom_kinds == {"prefill": 1, "weights": 1}


def test_an_incident_that_stands_on_each_rank_is_one():
    rows = [row("1", rank=f"TP{n}", oom_kinds=["prefill", "prefill"]) for n in range(8)]
    assert summed(rows).total.oom_kinds == {"prefill": 2}


def test_groups_that_leave_the_most_come_first():
    files = [[row("1", "small", idle_state_bytes=1)], [row("2", "large", kv_never_used_bytes=9)], [row("3", "none")]]
    found = summed(*files, top=2)
    assert [group.values for group in found.groups] == [("large",), ("small",)]
    assert found.groups_in_all == 3
    assert found.total.logs == 3


def test_the_worst_ranks_come_in_order_the_first_of_equals_first():
    sizes = [3, 9, 3, 1, 9]
    found = summed(*([row(str(n), kv_never_used_bytes=size)] for n, size in enumerate(sizes)), top=3)
    assert [(worst.file, worst.kv_never_used_bytes) for worst in found.worst] == [("1", 9), ("4", 9), ("0", 3)]


def test_a_negative_residual_takes_nothing_from_what_is_idle():
    found = summed([row("1", idle_state_bytes=5, residual_bytes=-100, unexplained_bytes=0, verdict="over_counted")])
    assert found.worst[0].idle_state_bytes == 5
    assert found.total.over_counted_ranks == 1


def test_files_that_gave_nothing_are_named_the_first_of_them():
    bad = [[{"file": str(n), "status": "unreadable", "error": "why"}] for n in range(5)]
    found = summed(*bad, top=2)
    assert found.statuses == {"unreadable": 5}
    assert [unread.file for unread in found.unread] == ["0", "1"]
    assert found.groups == ()


def test_groups_go_by_what_a_reader_knows():
    assert group_value({"gpu_kind": "cuda", "gpu_total_bytes": 80 * 2**30}, "gpu") == "cuda 80 GiB"
    assert group_value({"gpu": "H100", "gpu_total_bytes": 1}, "gpu") == "H100"
    assert group_value({}, "gpu") is None
    assert group_value({"framework": "sglang", "framework_version": "0.5.18"}, "framework_version") == "SGLang 0.5.18"
    assert group_value({"framework": "sglang"}, "framework_version") == "SGLang"
