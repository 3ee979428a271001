"""A server that dies of something else than memory still has a cause, and what only reports a death is none."""

import pytest

from memledger.frameworks.exceptions import RootCause, ends_traceback, is_requests, is_wrapper, kind_of
from memledger.grammar import load_rules
from memledger.scan import Scanner

RULES = load_rules()


def event(line):
    (found,) = Scanner(RULES).events(iter([(line + "\n").encode()]), 0)
    return found


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "cuda_error"),
        ("RuntimeError: Check failed: (status == cudaSuccess) is false: prefill failed", "cuda_error"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:77, unhandled system error", "library_error"),
        ("RuntimeError: cutlass_gemm_caller, gemm.cuh:62, Error Internal", "library_error"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig", "config_error"),
        ("TypeError: f() takes 1 positional argument but 2 were given", "exception"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456", "not_device_memory"),
        (
            "RuntimeError: Failed to allocate memory for tmp_v with size 5 and alignment 16 in AlignedAllocator",
            "workspace",
        ),
        ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.", "exception"),
    ],
)
def test_what_kind_of_failure_an_exception_is(line, kind):
    assert kind_of(event(line)) == kind


def test_before_any_engine_a_bad_value_is_the_configurations():
    bad = event("ValueError: the tensor parallel size has to divide the number of heads")
    assert (kind_of(bad, before_engine=True), kind_of(bad)) == ("config_error", "exception")


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Worker failed with error 'something', please check the stack trace above for the root cause",
        "ray.exceptions.RayTaskError(TypeError): ray::Worker.execute() (pid=7)",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_wrapper_is_no_cause(line):
    assert is_wrapper(event(line))


def test_the_answer_to_a_request_is_known_as_one():
    assert is_requests(event("app.exceptions.VLLMValidationError: the prompt is too long"))
    assert not is_requests(event("ValueError: something else"))


def test_a_line_with_a_rule_of_its_own_may_end_a_traceback():
    line = (
        "ValueError: Hybrid models require block_size <= max_num_batched_tokens < 2 * block_size; "
        "got max_num_batched_tokens=8192, block_size=1600"
    )
    assert ends_traceback(event(line))
    assert not ends_traceback(event("Memory pool end. avail mem=1.00 GB"))


def test_a_worker_explains_the_engine_and_the_engine_the_front_end():
    cause = RootCause()
    cause.take(event("ValueError: the front end's"), "front", 3, "start")
    cause.take(event("ValueError: the worker's"), "worker", 0, "weights")
    cause.take(event("ValueError: the engine's"), "engine", 1, "start")
    found = cause.failure()
    assert (found.numbers["cause"], found.phase) == ("the worker's", "weights")


def test_of_one_traceback_the_last_exception_counts_and_of_later_ones_none():
    cause = RootCause()
    stamp = "(EngineCore pid=7) ERROR 11-02 10:12:{} [core.py:1] "
    cause.take(event(stamp.format("05") + "RuntimeError: the interpreter failed"), 7, 1, "serving")
    cause.take(event(stamp.format("05") + "RuntimeError: out-of-bounds access"), 7, 1, "serving")
    cause.take(event(stamp.format("09") + "OSError: while it was closing"), 7, 1, "serving")
    assert cause.failure().numbers["cause"] == "out-of-bounds access"


def test_a_process_that_goes_on_has_not_died():
    cause = RootCause()
    cause.take(event("ImportError: no such module"), 7, 1, "start")
    cause.forget(7)
    assert not cause
    assert cause.failure() is None
