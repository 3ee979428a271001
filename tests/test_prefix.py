"""What stands before a message, and where a message can start."""

import json

import pytest

from memledger.events import Prefix
from memledger.prefix import check_samples, joined_fragments, peel, prefix_rules, records

POOL_END = "Memory pool end. avail mem=1.00 GB"
AVAILABLE = "Available KV cache memory: 5.00 GiB"
RECORD = "INFO 05-01 22:44:30 [gpu_worker.py:456] "


def messages(line: str) -> list[str]:
    return [record.message for record in records(line)]


def test_every_sample_of_the_prefix_file_is_read_as_it_says() -> None:
    assert check_samples() == []
    assert len({rule.id for rule in prefix_rules()}) == len(prefix_rules())


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("[2026-05-01 22:44:30] ", {}),
        ("[2026-05-01 22:44:30 TP3] ", {"tp": 3}),
        ("[2026-05-01 22:44:30 DP1 TP4 EP4] ", {"dp": 1, "tp": 4, "ep": 4}),
        ("[2026-05-01 22:44:30 DP1 TP4 EP4 PP0] ", {"dp": 1, "tp": 4, "ep": 4, "pp": 0}),
        ("[2026-05-01 22:44:30 PP0 ATTN_CP1 MOE_DP2 TP3] ", {"pp": 0, "attn_cp": 1, "moe_dp": 2, "tp": 3}),
        ("[22:44:30 DP0 TP0] ", {"dp": 0, "tp": 0}),
        ("[gpu=2] ", {"gpu": 2}),
        ("[gpu_id=2] ", {"gpu": 2}),
        ("[TP2]   ", {"tp": 2}),
        ("[TP0..3] ", {}),
        ("[TP0-3] ", {}),
        ("(Worker_TP0_DCP0_EP0 pid=9) " + RECORD, {"tp": 0, "dcp": 0, "ep": 0}),
        ("(Worker_DP1_PP0_TP3_EP7 pid=9) " + RECORD, {"dp": 1, "pp": 0, "tp": 3, "ep": 7}),
        ("(VllmWorker TP1 pid=9) " + RECORD, {"tp": 1}),
        ("(VllmWorker PP0_TP1 pid=9) " + RECORD, {"pp": 0, "tp": 1}),
        ("(VllmWorker rank=1 pid=9) " + RECORD, {"rank": 1}),
        ("(VllmWorker-1 pid=9) " + RECORD, {"rank": 1}),
        ("(VllmWorkerProcess pid=9) " + RECORD, {}),
        ("(Worker pid=9) " + RECORD, {}),
        ("(MainProcess pid=9) " + RECORD, {}),
        ("(ApiServer_2 pid=9) " + RECORD, {}),
        ("(EngineCore_DP3 pid=9) " + RECORD, {"dp": 3}),
        ("(EngineCore_1 pid=9) " + RECORD, {"dp": 1}),
        ("[rank1]: ", {"rank": 1}),
    ],
)
def test_ranks_are_read_as_printed(line: str, ranks: dict[str, int]) -> None:
    prefix, message = peel(line + POOL_END)
    assert (prefix.ranks, message) == (ranks, POOL_END)


def test_a_vllm_record_tells_level_time_file_process_and_pid() -> None:
    prefix, message = peel(
        "\x1b[1;36m(EngineCore_DP0 pid=81)\x1b[0;0m INFO 09-13 01:02:03 [v1/worker/gpu_worker.py:298] " + AVAILABLE
    )
    assert message == AVAILABLE
    assert (prefix.level, prefix.time, prefix.file, prefix.process, prefix.pid) == (
        "INFO",
        "--09-13T01:02:03",
        "v1/worker/gpu_worker.py",
        "EngineCore_DP0",
        81,
    )
    assert prefix.style == "vllm"


def test_colours_inside_the_record_are_taken_off() -> None:
    line = (
        "\x1b[0;36m(Worker_TP0 pid=4)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m08-26 10:00:00\x1b[0m \x1b[90m[gpu_worker.py:1]\x1b[0m "
        + AVAILABLE
    )
    assert peel(line)[1] == AVAILABLE


def test_text_of_the_users_choice_before_a_vllm_record() -> None:
    prefix, message = _last("llama-prod: (EngineCore pid=4) " + RECORD + AVAILABLE)
    assert (prefix.process, message) == ("EngineCore", AVAILABLE)


def _last(line: str) -> tuple[Prefix, str]:
    record = records(line)[-1]
    return record.prefix, record.message


def test_of_two_process_prefixes_the_inner_one_speaks() -> None:
    prefix, message = peel("(EngineCore_DP0 pid=749) (RayWorkerWrapper pid=347, ip=192.0.2.4) " + RECORD + AVAILABLE)
    assert (prefix.process, prefix.pid, prefix.host, message) == ("RayWorkerWrapper", 347, "192.0.2.4", AVAILABLE)


def test_ray_says_how_many_ranks_it_swallowed() -> None:
    prefix, message = peel(
        "(RayWorkerWrapper pid=776, ip=192.0.2.4) "
        + RECORD
        + AVAILABLE
        + " [repeated 15x across cluster] (Ray deduplicates logs)"
    )
    assert (prefix.repeated, message) == (15, AVAILABLE)


@pytest.mark.parametrize(
    ("wrapper", "source"),
    [
        ("vllm-1  | ", "vllm-1"),
        ("2026-05-01T22:44:30.255123456Z ", None),
        ("2026-05-01T22:44:30.255123456Z stderr F ", None),
        ("2026-05-01 22:44:30.255 | ", None),
        ("[pod/qwen-0/server] ", "pod/qwen-0/server"),
        ("[pod/qwen-0/server] 2026-05-01T22:44:30.255123456Z ", "pod/qwen-0/server"),
        ("Aug 18 22:22:05 node7 vllm[1833]: ", "node7/vllm"),
        ("2026-08-18T22:22:05+0200 node7 vllm[1833]: ", "node7/vllm"),
        ("MESSAGE=", None),
        ("3: ", "task 3"),
        (" 12: ", "task 12"),
        ("[1,2]<stderr>:", "task 1,2"),
        ("> ", None),
        ("| ", None),
        ("- ", None),
        ("  * ", None),
        ("1. `", None),
        ("    ", None),
        ("#│ server ", "server"),
        ("(base) user@host:~/dir$ ", None),
        ("812:", None),
        ("node0.log:812:", "node0.log"),
    ],
)
@pytest.mark.parametrize("record", ["[2026-05-01 22:44:30 TP1] " + POOL_END, "(EngineCore pid=7) " + RECORD + POOL_END])
def test_what_carried_the_line_is_taken_off(wrapper: str, source: str | None, record: str) -> None:
    prefix, message = peel(wrapper + record)
    assert message.rstrip("`") == POOL_END
    assert prefix.source == source
    assert prefix.time is not None
    assert prefix.time.endswith("22:44:30")


@pytest.mark.parametrize(
    ("start", "level"),
    [
        ("2025-08-11 16:12:02 gpu_worker.py:104 INFO:vllm.v1.worker.gpu_worker p:475095 t:140373120079680: ", "INFO"),
        ("2026-06-08 04:18:37,170 - vllm.worker - WARNING - ", "WARNING"),
        ("2026-06-08 04:18:37,170 INFO vllm.worker: ", "INFO"),
        ("2026-06-08T04:18:37Z INFO [gpu_worker.py:104] ", "INFO"),
        ("2026-06-08 04:18:37.170 | INFO     | vllm.worker:load:104 - ", "INFO"),
        ("INFO:vllm.worker:", "INFO"),
        ("INFO:     ", "INFO"),
        ("[2026-06-08 04:18:37] INFO worker.py:1835: ", "INFO"),
    ],
)
def test_a_logging_format_of_the_users_own(start: str, level: str) -> None:
    prefix, message = peel(start + AVAILABLE)
    assert (message, prefix.level) == (AVAILABLE, level)


def test_the_process_of_a_users_own_format() -> None:
    assert peel("2025-08-11 16:12:02 a.py:4 INFO:vllm.x p:475095 t:14037: " + AVAILABLE)[0].pid == 475095


def test_no_prefix_at_all() -> None:
    assert peel(POOL_END) == (Prefix(), POOL_END)


def test_the_name_of_an_exception_is_part_of_the_message() -> None:
    assert (
        peel("[2026-05-01 22:44:30 TP1] torch.OutOfMemoryError: CUDA out of memory.")[1]
        == "torch.OutOfMemoryError: CUDA out of memory."
    )


# ---- JSON


def test_a_json_record_of_vllm() -> None:
    line = json.dumps(
        {
            "asctime": "11-02 10:12:56",
            "levelname": "INFO",
            "name": "vllm.v1.worker",
            "processName": "VllmWorker-1",
            "process": 77,
            "message": AVAILABLE,
        }
    )
    prefix, message = peel(line)
    assert message == AVAILABLE
    assert (prefix.time, prefix.level, prefix.process, prefix.pid, prefix.ranks, prefix.style) == (
        "--11-02T10:12:56",
        "INFO",
        "VllmWorker-1",
        77,
        {"rank": 1},
        "vllm",
    )


@pytest.mark.parametrize("key", ["message", "msg", "log", "event"])
def test_json_records_of_other_loggers(key: str) -> None:
    assert peel(json.dumps({"timestamp": "2026-05-01T22:44:30Z", "level": "info", key: POOL_END}))[1] == POOL_END


def test_a_json_object_without_time_or_level_is_no_record() -> None:
    line = json.dumps({"model": "m", "message": POOL_END})
    assert messages(line) == [line]


def test_dockers_json_file_with_an_engine_prefix_inside() -> None:
    line = json.dumps(
        {"log": "(Worker_TP1 pid=9) " + RECORD + AVAILABLE + "\n", "stream": "stdout", "time": "2026-05-01T22:44:31.1Z"}
    )
    prefix, message = peel(line)
    assert (message, prefix.ranks, prefix.wrapper_time, prefix.time) == (
        AVAILABLE,
        {"tp": 1},
        "2026-05-01T22:44:31.1Z",
        "--05-01T22:44:30",
    )


def test_journald_json() -> None:
    entry = {
        "__REALTIME_TIMESTAMP": "1777675470000000",
        "_HOSTNAME": "node7",
        "_SYSTEMD_UNIT": "sglang.service",
        "MESSAGE": "[2026-05-01 22:44:30 TP2] " + POOL_END,
    }
    prefix, message = peel(json.dumps(entry))
    assert (message, prefix.ranks, prefix.source) == (POOL_END, {"tp": 2}, "node7/sglang.service")
    assert prefix.wrapper_time is not None
    coloured = {**entry, "MESSAGE": list(("\x1b[1m[2026-05-01 22:44:30 TP2]\x1b[0m " + POOL_END).encode())}
    assert peel(json.dumps(coloured))[1] == POOL_END


def test_json_in_compose_and_in_cri() -> None:
    record = json.dumps({"asctime": "11-02 10:12:56", "levelname": "INFO", "name": "vllm", "message": AVAILABLE})
    assert peel("vllm-1  | " + record)[1] == AVAILABLE
    assert peel("2026-05-01T22:44:30.255123456Z stderr F " + record)[1] == AVAILABLE


@pytest.mark.parametrize("start", ["", '"body": ', '  "log": ', "      "])
def test_an_excerpt_quoted_in_json_holds_several_lines(start: str) -> None:
    text = "It fails:\n[2026-05-01 22:44:30 TP0] " + POOL_END + "\n(EngineCore pid=7) " + RECORD + AVAILABLE + "\n"
    assert messages(start + json.dumps(text) + ",")[1:] == [POOL_END, AVAILABLE]


# ---- glued and flattened


@pytest.mark.parametrize(
    "lead",
    [
        "100%|██████████| 3/3 [00:01<00:00,  1.20it/s]",
        "Capturing batches (bs=1 avail_mem=5.00 GB): 100%|██████████| 3/3 [00:01<00:00,  1.20s/it]",
        "  0%|          | 0/3 [00:00<?, ?it/s]",
        "(EngineCore pid=7) Capturing CUDA graphs: 100%|██████████| 3/3 [00:01<00:00,  1.20it/s]",
        "....",
        "someuser-a",
    ],
)
@pytest.mark.parametrize("record", ["[2026-05-01 22:44:30 TP1] ", "(Worker_TP1 pid=9) " + RECORD])
def test_a_record_after_something_that_ended_without_a_line_end(lead: str, record: str) -> None:
    prefix, message = _last(lead + record + POOL_END)
    assert (message, prefix.ranks) == (POOL_END, {"tp": 1})


def test_a_record_after_a_bar_keeps_the_process_that_drew_the_bar() -> None:
    prefix, _ = _last("(Worker_TP3 pid=9) Capturing: 100%|██| 3/3 [00:01<00:00,  1.20it/s]" + RECORD + AVAILABLE)
    assert (prefix.process, prefix.pid, prefix.ranks) == ("Worker_TP3", 9, {"tp": 3})


def test_a_log_flattened_to_one_line() -> None:
    line = (
        "### What happens ``` (EngineCore pid=7) "
        + RECORD
        + AVAILABLE
        + " (Worker_TP1 pid=9) "
        + RECORD
        + "Loading weights took 3.20 seconds ..."
    )
    assert messages(line)[1:] == [AVAILABLE, "Loading weights took 3.20 seconds ..."]


# ---- text that is not the server's

FORGED = "[2026-05-01 22:44:30 TP0] " + POOL_END
FORGED_VLLM = "(EngineCore pid=7) " + RECORD + AVAILABLE


@pytest.mark.parametrize("forged", [FORGED, FORGED_VLLM, POOL_END])
@pytest.mark.parametrize(
    "line",
    [
        "INFO 05-02 10:00:00 [logger.py:37] Received request chatcmpl-1: prompt: '{}', params: SamplingParams(n=1), prompt_token_ids: [1]",
        "[2026-05-02 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='{}', sampling_params={{}})",
        "[2026-05-02 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='100%|██| 3/3 [00:01<00:00,  1.20it/s]{}', sampling_params={{}})",
        '[2026-05-02 10:00:00] INFO:     192.0.2.1:80 - "GET /search?q={} HTTP/1.1" 200 OK',
        '192.0.2.1 - - [02/May/2026] "GET /search?q={} HTTP/1.1" 200 12',
        '{{"model": "m", "messages": [{{"role": "user", "content": "{}"}}]}}',
        '{{"level": "info", "time": "2026-05-02T10:00:00Z", "message": "Received request a: prompt: \'x\\n{}\\n\'"}}',
        'request body: {{"prompt": "look: {}"}}',
        'payload "prompt": "x {}"',
        'curl http://localhost/v1/completions -d \'{{"prompt": "x {}"}}\'',
        '[2026-05-02 10:00:00] Error in reply: the model said "{}"',
        "(APIServer pid=1) ERROR 05-02 10:00:00 [serving.py:9] Bad tool call: {}",
    ],
)
def test_log_text_inside_a_request_never_starts_a_record(line: str, forged: str) -> None:
    for message in messages(line.format(forged, forged)):
        assert not message.startswith((POOL_END, AVAILABLE)), message


def test_what_cannot_be_told_prose_before_a_whole_prefix_is_taken_for_a_flattened_log() -> None:
    assert messages("somebody wrote: " + FORGED)[1:] == [POOL_END]


def test_a_number_longer_than_any_rank_or_pid_is_neither() -> None:
    digits = "9" * 5000
    for line in (
        f"[2026-05-01 22:44:30 TP{digits}] {POOL_END}",
        f"(VllmWorker pid={digits}) {RECORD}{POOL_END}",
        f"(EngineCore_DP{digits} pid=9) {RECORD}{POOL_END}",
        f"(Worker_TP{digits} pid=9) {RECORD}{POOL_END}",
        f"{RECORD}{POOL_END} [repeated {digits}x across cluster]",
    ):
        assert all(r.prefix.ranks == {} and r.prefix.repeated is None for r in records(line)), line
        assert all(r.prefix.pid in {None, 9} for r in records(line)), line


@pytest.mark.parametrize(
    "line",
    [
        '{"__REALTIME_TIMESTAMP": "\N{SUPERSCRIPT TWO}", "MESSAGE": "%s"}',
        '{"log":"%s","x":' + "[" * 5000,
        '{"log":"%s","x":' + "9" * 5000 + "}",
    ],
)
def test_strange_json_is_read_or_left(line: str) -> None:
    text, whole = joined_fragments(b"", (line % POOL_END).encode(), [])
    assert whole
    assert text is not None
    assert messages(text)


# ---- records split by a container's log driver


def test_cri_fragments_are_joined_in_their_stream() -> None:
    stamp = "2026-05-01T22:44:30.255123456Z "
    first = (stamp + "stderr P [2026-05-01 22:44:30 TP0] Memory pool ").encode()
    following = [(stamp + "stdout F something else").encode(), (stamp + "stderr F end. avail mem=1.00 GB").encode()]
    text, whole = joined_fragments(b"", first, following)
    assert text is not None
    assert (peel(text)[1], whole) == (POOL_END, False)
    assert joined_fragments(first, following[1], []) == (None, False)


def test_docker_fragments_of_16_kib_are_joined() -> None:
    record = "[2026-05-01 22:44:30] server_args=" + "x" * 16400 + " end"
    pieces = [record[: 16 * 1024], record[16 * 1024 :] + "\n"]
    lines = [
        json.dumps({"log": piece, "stream": "stderr", "time": "t"}, separators=(",", ":")).encode() for piece in pieces
    ]
    text, whole = joined_fragments(b"", lines[0], [lines[1]])
    assert text is not None
    assert not whole
    assert peel(text)[1].endswith("x end")
