"""The kernel kills the largest process, which need not be the server's."""

import pytest

from memledger.frameworks.kernel import kind_of_kill
from memledger.grammar import load_rules
from memledger.scan import Scanner

RULES = load_rules()


def event(line):
    (found,) = Scanner(RULES).events(iter([(line + "\n").encode()]), 0)
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("python3", "host_memory"),
        ("VLLM::EngineCor", "host_memory"),
        ("sglang::schedul", "host_memory"),
        ("ray::RayWorkerW", "host_memory"),
        ("cicc", "other_process_killed"),
        ("postgres", "other_process_killed"),
    ],
)
def test_whose_process_was_killed(name, kind):
    line = f"Out of memory: Killed process 733 ({name}) total-vm:90000000kB, anon-rss:33554432kB, file-rss:0kB"
    assert kind_of_kill(event(line)) == kind


def test_other_lines_say_nothing_of_it():
    assert kind_of_kill(event("vllm-1 exited with code 137")) is None
