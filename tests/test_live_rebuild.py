"""A server without a log: what its answers, its command line and the model's arithmetic give, and what stays unknown."""

import json

import pytest

from memledger.ledger import Source
from memledger.live.rebuild import report
from memledger.live.sample import Device, DeviceSample, Endpoint, LiveServer, LogPlace, Metrics, Process, Sample
from memledger.units import GIB

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
}
TOKEN = 2 * 8 * 128 * 2 * 36


def sample():
    return Sample("2026", devices=DeviceSample(Source("nvml", "ok"), devices=(Device(0, "GPU-0", "H100"),)))


def vllm(*arguments, **more):
    words = ("python", "/bin/vllm", "serve", "/models/a", *arguments)
    processes = (
        Process(1, role="launcher", arguments=words),
        Process(2, role="engine", title="VLLM::EngineCore"),
        Process(3, role="worker", title="VLLM::Worker"),
    )
    given = {"framework_version": "0.32.0", "model": "/models/a", "processes": processes}
    return LiveServer(1, "vllm", **{**given, **more})


def sglang(info=None, **more):
    processes = (
        Process(1, role="launcher", arguments=("python", "-m", "sglang.launch_server", "--model-path", "/models/a")),
        Process(2, role="scheduler", title="sglang::scheduler"),
    )
    answers = (Endpoint("/server_info", 200, info),) if info is not None else ()
    return LiveServer(
        1, "sglang", **{"framework_version": "0.5.23", "model": "/models/a", "processes": processes, "endpoints": answers, **more}
    )  # fmt: skip


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DENSE))
    return file


def rank(found):
    (server,) = found.servers
    (one,) = server.ranks
    return one, {e.account: e for e in one.entries}


def test_a_dense_vllm_server_by_its_tokens_and_its_model(config):
    metrics = Metrics(kv_tokens=100_000, kv_blocks=6250, kv_block_tokens=16)
    found = report(vllm("--gpu-memory-utilization", "0.8", metrics=metrics), sample(), model_config=config)
    one, rows = rank(found)
    pool = rows["kv_cache/pool"]
    assert pool.basis == "modelled"
    assert abs(pool.bytes - 100_000 * TOKEN) <= pool.tolerance_bytes
    assert rows["weights/model"].bytes == pytest.approx(8.19e9 * 2, rel=0.02)
    assert one.capacity.kv_tokens == 100_000
    assert found.servers[0].config["memory_fraction"] == 0.8
    assert one.residual.verdict == "open"
    assert "the CUDA graphs" in one.residual.reason


def test_a_pool_given_in_bytes_is_what_the_server_says():
    metrics = Metrics(kv_tokens=1000, labels={"kv_cache_memory_bytes": str(GIB), "gpu_memory_utilization": "0.92"})
    found = report(vllm(metrics=metrics), sample())
    _, rows = rank(found)
    assert (rows["kv_cache/pool"].bytes, rows["kv_cache/pool"].basis) == (GIB, "live")
    assert found.servers[0].config["memory_fraction"] == 0.92


def test_without_a_model_nothing_is_made_up():
    found = report(vllm(), sample())
    one, rows = rank(found)
    assert rows == {}
    assert any("weights not known" in note for note in found.servers[0].notes)
    assert one.residual.bytes is None


MEMORY = {"weight": 15.27, "kvcache": 40.0, "graph": {"decode": 0.5, "prefill": 0.25}}


def test_sglang_says_what_it_measured():
    info = {"tp_size": 1, "mem_fraction_static": 0.85, "internal_states": [{"memory_usage": MEMORY}]}
    _, rows = rank(report(sglang(info), sample()))
    assert {a: (e.bytes, e.basis) for a, e in rows.items()} == {
        "weights/model": (round(15.27 * GIB), "live"),
        "kv_cache/pool": (40 * GIB, "live"),
        "cuda_graphs/total": (round(0.75 * GIB), "live"),
    }
    assert rows["weights/model"].tolerance_bytes == GIB // 2000


@pytest.mark.parametrize(
    "info", [{}, [], "x", {"internal_states": "x"}, {"internal_states": [3]}, {"internal_states": [{"memory_usage": {"weight": "nan"}}]}]
)  # fmt: skip
def test_answers_of_another_form_give_nothing(info):
    _, rows = rank(report(sglang(info), sample()))
    assert "kv_cache/pool" not in rows
    assert "weights/model" not in rows


def test_the_recurrent_state_that_sglangs_answers_leave_out_is_modelled():
    info = {"tp_size": 1, "internal_states": [{"memory_usage": MEMORY}]}
    metrics = Metrics(kv_tokens=1000, state_slots=124)
    live = sglang(info, metrics=metrics, model="/models/Qwen3.8-27B-FP8")
    one, rows = rank(report(live, sample()))
    state = rows["recurrent_state/ssm"]
    assert state.basis == "modelled"
    # 17.58 + 0.34 GiB in the demo's log for the same model and slots
    assert state.bytes / GIB == pytest.approx(17.92, abs=0.02)
    assert one.capacity.state_slots == 124


def test_why_there_is_no_log_is_the_source_s_reason():
    live = vllm(log=LogPlace(None, "terminal", "the log goes to the terminal /dev/pts/3"))
    (log, *_) = report(live, sample()).sources
    assert (log.name, log.status, log.reason) == ("log", "unavailable", "the log goes to the terminal /dev/pts/3")


def test_a_config_that_cant_be_used_is_said(tmp_path):
    found = report(vllm(), sample(), model_config=tmp_path / "none.json")
    source = next(s for s in found.sources if s.name == "model")
    assert source.status == "unavailable"
    assert source.reason.startswith("--model-config:")


def test_ranks_are_the_workers_in_order():
    processes = (
        Process(1, role="launcher", arguments=("vllm", "serve", "/models/a")),
        Process(5, role="worker", tp=1),
        Process(4, role="worker", tp=0),
        Process(6, role="worker", tp=2, zombie=True),
    )
    (server,) = report(vllm(processes=processes), sample()).servers
    assert [(r.tp, r.pid) for r in server.ranks] == [(0, 4), (1, 5)]
    assert server.config["tp_size"] == 3
