"""What processes of SGLang and vLLM are called: titles of all versions, command lines, names cut to 15 characters."""

import pytest

from memledger.live.titles import (
    flags,
    is_shell,
    read_comm,
    read_command,
    read_title,
    served_model,
    shown_arguments,
)


@pytest.mark.parametrize(
    ("title", "framework", "role", "ranks"),
    [
        ("sglang::scheduler", "sglang", "scheduler", (None, None, None, None)),
        ("sglang::scheduler_TP0", "sglang", "scheduler", (None, None, 0, None)),
        ("sglang::scheduler_DP1_TP3_EP3", "sglang", "scheduler", (1, None, 3, 3)),
        ("sglang::scheduler_PP1_TP2", "sglang", "scheduler", (None, 1, 2, None)),
        ("sglang::scheduler_DP0_TP1_EP1_PP0", "sglang", "scheduler", (0, 0, 1, 1)),
        ("sglang::scheduler_ATTN_CP1_MOE_DP2_TP3", "sglang", "scheduler", (None, None, 3, None)),
        ("sglang::detokenizer", "sglang", "detokenizer", (None,) * 4),
        ("sglang::detokenizer_router", "sglang", "detokenizer", (None,) * 4),
        ("sglang::data_parallel_controller", "sglang", "coordinator", (None,) * 4),
        ("sglang::tokenizer_worker:4242", "sglang", "api_server", (None,) * 4),
        ("sglang::http_server/tokenizer_manager", "sglang", "launcher", (None,) * 4),
        ("sglang::new_helper", "sglang", "helper", (None,) * 4),
        ("VLLM::EngineCore", "vllm", "engine", (None,) * 4),
        ("VLLM::EngineCore_DP3", "vllm", "engine", (3, None, None, None)),
        ("VLLM::DPEngineCore_2", "vllm", "engine", (2, None, None, None)),
        ("VLLM::Worker", "vllm", "worker", (None,) * 4),
        ("VLLM::Worker_TP1", "vllm", "worker", (None, None, 1, None)),
        ("VLLM::Worker_DP0_PP1_PCP0_TP3_DCP1_EP7", "vllm", "worker", (0, 1, 3, 7)),
        ("VLLM::EngineCore_0_TP1", "vllm", "worker", (0, None, 1, None)),
        ("VLLM::APIServer_1", "vllm", "api_server", (None,) * 4),
        ("VLLM::APIServer_DPRank_2", "vllm", "api_server", (2, None, None, None)),
        ("VLLM::DPCoordinator", "vllm", "coordinator", (None,) * 4),
        ("ray::RayWorkerWrapper.execute_method", "vllm", "worker", (None,) * 4),
    ],
)
def test_titles_of_all_versions(title, framework, role, ranks):
    found = read_title(title)
    assert (found.framework, found.role) == (framework, role)
    assert (found.dp, found.pp, found.tp, found.ep) == ranks


@pytest.mark.parametrize(
    "title", ["nginx: worker process", "python3", "", "ray::IDLE", "postgres::Worker", "std::Worker"]
)
def test_other_titles_are_no_engines(title):
    assert read_title(title) is None


def test_a_prefix_of_ones_own_counts_below_a_vllm_server_only():
    assert read_title("PROD::Worker_TP1") is None
    assert read_title("PROD::Worker_TP1", "vllm").tp == 1
    assert read_title("PROD::Worker_TP1", "sglang") is None


@pytest.mark.parametrize(
    ("comm", "role"),
    [
        ("sglang::schedul", "scheduler"), ("sglang::detoken", "detokenizer"), ("sglang::data_pa", "coordinator"),
        ("VLLM::EngineCor", "engine"), ("VLLM::Worker_TP", "worker"), ("VLLM::Worker", "worker"),
        ("VLLM::APIServer", "api_server"), ("VLLM::DPCoordin", "coordinator"), ("VLLM::DPEngineC", "engine"),
    ],
)  # fmt: skip
def test_a_name_cut_to_15_characters_tells_the_role_and_no_rank(comm, role):
    found = read_comm(comm)
    assert found.role == role
    assert found.tp is None


@pytest.mark.parametrize("comm", ["python3", "kworker/0:1", "tee", "a-name-of-15-ch"])
def test_other_names_are_no_engines(comm):
    assert read_comm(comm) is None


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("python3 -m sglang.launch_server --model-path /m", "sglang"),
        ("/opt/venv/bin/python3 /opt/venv/bin/sglang serve --model-path /m", "sglang"),
        ("python -m sglang serve --model-path /m", "sglang"),
        ("python3 -u -X faulthandler -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("/usr/bin/python3.12 /usr/local/bin/vllm serve m --port 1", "vllm"),
        ("python -m vllm.entrypoints.cli.main serve m", "vllm"),
        ("python3 /srv/vllm/entrypoints/openai/api_server.py --model m", "vllm"),
        ("vllm serve m", "vllm"),
        ("python3 -m vllm bench serve m", None),
        ("python3 /opt/bin/vllm bench throughput", None),
        ("python3 -m sglang.bench_serving --model m", None),
        ("bash -c vllm serve m", None),
        ("uv run vllm serve m", None),
        ("timeout 60 python3 -m sglang.launch_server", None),
        ("tail -f vllm serve.log", None),
        ("python3 -c print(1)", None),
        ("vim /srv/sglang/launch_server.py", None),
        ("", None),
    ],
)
def test_command_lines_that_launch_a_server(line, framework):
    assert read_command(line.split(" ")) == framework


def test_shells_and_wrappers_are_told_apart():
    assert is_shell(["/bin/bash", "-c", "vllm serve m"], "bash")
    assert is_shell(["uv", "run", "vllm"], "uv")
    assert not is_shell(["/usr/bin/python3", "-m", "vllm"], "python3")


def test_secrets_are_masked_whether_they_follow_an_equals_sign_or_a_blank():
    shown = shown_arguments(
        [
            "vllm",
            "serve",
            "m",
            "--api-key",
            "abcd1234efgh",
            "second-key-5678",
            "--port",
            "8000",
            "--hf-token=hf_abcdefghijklmnopqrst",
        ]
    )
    assert shown == ("vllm", "serve", "m", "--api-key", "***", "***", "--port", "8000", "--hf-token=***")


def test_flags_keep_their_last_value():
    assert flags(["vllm", "serve", "-tp", "2", "--enforce-eager", "--port=1", "--port", "2"]) == {
        "tp": "2",
        "enforce_eager": True,
        "port": "2",
    }


@pytest.mark.parametrize(
    ("framework", "line", "model"),
    [
        ("vllm", "python vllm serve /m/a --port 1", "/m/a"),
        ("vllm", "python vllm serve --model b", "b"),
        ("vllm", "python vllm serve --config c.yaml", None),
        ("sglang", "python -m sglang.launch_server --model-path=/m/c", "/m/c"),
        ("sglang", "python -m sglang.launch_server --model d", "d"),
    ],
)
def test_the_model_that_a_command_line_names(framework, line, model):
    assert served_model(framework, line.split()) == model
