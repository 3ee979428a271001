"""Logs of the nodes of one job become one server; anything that disagrees keeps them apart, and the report says why."""

import msgspec
import pytest

from memledger.join import join_servers, why_apart
from memledger.ledger import Failure, Input, Rank, Server, Span, Usage


def node(index, ranks, **changes):
    values = {
        "framework": "sglang",
        "model": "/models/example",
        "span": (Span(index, 1, 100),),
        "started_at": "2026-09-09T11:57:18",
        "config": {"tp_size": 4, "nnodes": 2},
        "ranks": tuple(Rank(tp=t) for t in ranks),
        "usage": Usage(peak_running_requests=3, peak_kv_usage=0.4, retractions=2, seen=True),
        "state": "serving",
    }
    return Server(**{**values, **changes})


INPUTS = (Input("node0.log", 1, 1), Input("node1.log", 1, 1))


def test_two_nodes_that_agree_are_one_server_with_all_ranks():
    later = node(
        1, (2, 3), started_at="2026-09-09T11:59:00", usage=Usage(peak_running_requests=5, retractions=1, seen=True)
    )
    (server,) = join_servers([node(0, (0, 1)), later], INPUTS)
    assert [r.tp for r in server.ranks] == [0, 1, 2, 3]
    assert server.started_at == "2026-09-09T11:57:18"
    assert (server.usage.peak_running_requests, server.usage.retractions, server.usage.seen) == (5, 3, True)
    assert server.usage.peak_kv_usage == 0.4
    assert {s.input for s in server.span} == {0, 1}
    assert "joined from node0.log, node1.log" in server.notes[-1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "/models/other"}, "models differ"),
        ({"framework": "vllm"}, "one is sglang"),
        ({"config": {"tp_size": 8, "nnodes": 2}}, "tp_size differs (4, 8)"),
        ({"started_at": "2026-09-09T13:00:00"}, "63 minutes apart"),
        ({"started_at": None}, "start time is not in both"),
        ({"ranks": (Rank(tp=1),)}, "same rank"),
        ({"model": None, "config": {}}, "nothing in the logs"),
    ],
)
def test_what_disagrees_is_kept_apart_and_says_why(changes, reason):
    other = msgspec.structs.replace(node(1, (2, 3)), **changes)
    assert reason in (why_apart(node(0, (0, 1)), other) or "")
    servers = join_servers([node(0, (0, 1)), other], INPUTS)
    assert len(servers) == 2
    assert reason in servers[1].notes[-1]


def test_two_starts_in_one_file_are_never_joined():
    servers = join_servers([node(0, (0, 1)), node(0, (2, 3))], INPUTS[:1])
    assert len(servers) == 2
    assert servers[0].notes == ()


def test_a_failure_on_one_node_makes_the_job_failed():
    failed = node(1, (2, 3), state="failed", failures=(Failure("cuda_oom", "decode"),))
    (server,) = join_servers([node(0, (0, 1)), failed], INPUTS)
    assert server.state == "failed"
    assert [f.kind for f in server.failures] == ["cuda_oom"]


def test_a_time_without_a_year_still_tells_minutes_apart():
    first = node(0, (0,), framework="vllm", started_at="--11-02T10:12:56")
    second = node(1, (1,), framework="vllm", started_at="--11-02T10:13:20")
    assert why_apart(first, second) is None


def test_a_rank_in_two_logs_is_named_by_its_label():
    why = why_apart(node(0, (0, 1)), node(1, (1, 2)))
    assert why == "both hold the same rank (TP1)"
