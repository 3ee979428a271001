"""When a failure happened: by the line's own word, then the traceback, then where the server stood."""

import pytest

from memledger.events import Prefix
from memledger.ledger import Evidence, Failure, Server, Span
from memledger.postmortem import phase
from memledger.postmortem.symptom import KINDS, Frame, Symptom


def frames(*names):
    return tuple(Frame("x.py", 1, name) for name in names)


def symptom(hint=None, line=9):
    return Symptom("torch_oom", KINDS["torch_oom"], "any.oom", Prefix(), 0, line, "a line", phase_hint=hint)


def server(stood, line=9):
    failure = Failure("device_memory", stood, {}, (Evidence(0, line, "a line"),))
    return Server("vllm", span=(Span(0, 1, 20),), failures=(failure,))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("load_model", "make_layers"), "weights"),
        (("__init__", "make_layers", "__init__"), "weights"),
        (("determine_available_memory", "profile_run", "_dummy_run", "forward"), "profiling"),
        (("initialize_from_config", "initialize_kv_cache"), "pools"),
        (("compile_or_warm_up_model", "capture_model", "_dummy_run"), "graph_capture"),
        (("compile_or_warm_up_model", "_dummy_sampler_run"), "warmup"),
        (("wake_up", "create_and_map"), "wake_up"),
        (("event_loop_overlap", "run_batch", "forward_extend"), "prefill"),
        (("event_loop_overlap", "run_batch", "forward_decode"), "decode"),
        (("run_engine_loop", "engine_step"), "serving"),
        (("main", "serve_http"), None),
        ((), None),
    ],
)
def test_functions_that_belong_to_one_phase_only(names, told):
    assert phase.of_frames(frames(*names)) == told


def test_the_lines_own_word_comes_first():
    assert phase.of(symptom("weights"), frames("profile_run"), server("graphs")) == ("weights", "the line itself")


def test_the_traceback_comes_before_where_the_server_stood():
    assert phase.of(symptom(), frames("profile_run"), server("graphs")) == ("profiling", "the traceback")


def test_a_traceback_that_only_says_serving_gives_way_to_where_it_stood():
    assert phase.of(symptom(), frames("execute_model"), server("warmup")) == ("warmup", "the lines before it")


def test_where_a_server_stood_counts_for_its_own_line_only():
    assert phase.of(symptom(line=12), (), server("warmup", line=9)) == ("unknown", "")
    assert phase.of(symptom(), (), None) == ("unknown", "")
