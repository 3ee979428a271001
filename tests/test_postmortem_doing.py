"""What a server was doing when it failed: of any number of usage lines, only those before a failure are kept."""

from memledger.events import Prefix
from memledger.grammar import load_rules
from memledger.ledger import Server, Span
from memledger.postmortem.doing import MOST_KEPT, MOST_SOURCES, Doing, phase_of_step
from memledger.postmortem.incident import ServerState
from memledger.postmortem.symptom import Symptom
from memledger.scan import Scanner

RULES = load_rules()
USAGE = (
    "(APIServer pid=30) INFO 08-01 18:{minute:02d}:10 [loggers.py:257] Engine {engine:03d}: Avg prompt throughput: 812.0 "
    "tokens/s, Avg generation throughput: 21.0 tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.3%, "
    "Prefix cache hit rate: 0.0%\n"
)
FAILED = "(EngineCore_DP{dp} pid=101) ERROR 08-01 18:59:14 [core.py:1004] RuntimeError: CUDA error: out of memory\n"


def usage(running, minute=1, engine=0):
    return USAGE.format(running=running, minute=minute, engine=engine)


def failed(dp=0):
    return FAILED.format(dp=dp)


def fed(text):
    doing = Doing()
    for event in Scanner(RULES).events([text.encode()], 0):
        doing.feed(event)
    return doing


def at(line, dp=None):
    return Symptom(
        "cuda_error", "cause", "any.cuda_error_oom", Prefix(ranks={} if dp is None else {"dp": dp}), 0, line, ""
    )


def test_the_last_line_counts_not_the_peak():
    state = fed(usage(9) + usage(2, 2) + failed()).at(at(3), None)
    assert (state.running, round(state.kv_usage, 6), state.at) == (2, 0.013, "--08-01T18:02:10")


def test_a_data_parallel_rank_has_its_own_line():
    doing = fed(usage(9, 1, engine=0) + usage(2, 2, engine=1) + failed(0))
    assert doing.at(at(3, dp=0), None).running == 9
    assert doing.at(at(3, dp=1), None).running == 2


def test_lines_after_the_failure_do_not_count():
    assert fed(failed() + usage(9)).at(at(1), None) is None


def test_lines_of_a_start_before_do_not_count():
    server = Server(framework="vllm", span=(Span(0, 2, 9),))
    assert fed(usage(9) + failed()).at(at(2), server) is None


def test_another_input_does_not_count():
    doing = fed(usage(9) + failed())
    other = Symptom("cuda_error", "cause", "any.cuda_error_oom", Prefix(), 1, 2, "")
    assert doing.at(other, None) is None


def test_of_many_failures_the_first_and_the_last_are_kept():
    many = 5 * MOST_KEPT
    doing = fed("".join(usage(i % 50 + 1, i % 60, engine=i % 7) + failed() for i in range(many)))
    assert len(doing._usage) <= 2 * MOST_KEPT
    assert doing.at(at(2), None).running == 1
    assert doing.at(at(2 * many), None).running == (many - 1) % 50 + 1


def test_of_many_engines_not_all_are_kept():
    doing = fed("".join(usage(1, 1, engine=i) for i in range(999)))
    assert len(doing._latest) <= MOST_SOURCES


def test_a_step_of_megabytes_is_read_at_its_ends():
    step = "Dumping scheduler output for model execution: SchedulerOutput(" + "x" * 500_000
    text = f"(EngineCore pid=101) ERROR 08-01 18:59:14 [dump_input.py:79] {step}, total_num_scheduled_tokens=8192)\n"
    text += (
        "(EngineCore pid=101) ERROR 08-01 18:59:14 [dump_input.py:81] Dumping scheduler stats: "
        "SchedulerStats(num_running_reqs=1, num_waiting_reqs=0, kv_cache_usage=0.5, x=0)\n"
    )
    assert fed(failed() + text).at(at(1), None).scheduled_tokens == 8192


def test_tokens_for_each_request_tell_prefill_from_decode():
    plain = Server(framework="vllm")
    drafting = Server(framework="vllm", config={"speculative_algorithm": "mtp", "speculative_draft_tokens": 3})
    unknown = Server(framework="vllm", config={"speculative_algorithm": "mtp"})
    state = ServerState(running=3, scheduled_tokens=12)
    assert phase_of_step(state, plain) == "prefill"
    assert phase_of_step(state, drafting) == "decode"
    assert phase_of_step(state, unknown) is None
    assert phase_of_step(ServerState(running=3, scheduled_tokens=3), plain) == "decode"
    assert phase_of_step(ServerState(running=3), plain) is None
    assert phase_of_step(None, plain) is None
