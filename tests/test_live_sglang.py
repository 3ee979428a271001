"""Against a real SGLang server, opt-in: MEMLEDGER_LIVE_SGLANG=1 while one runs on this machine (its installation takes 8 GB).

Its captured titles, pages and logs stand in everywhere else (tests/test_live_attach.py, tests/test_live_metrics.py).
"""

import os

import pytest

from memledger.live.attach import attach, find_servers

pytestmark = pytest.mark.skipif(
    os.environ.get("MEMLEDGER_LIVE_SGLANG") != "1",
    reason="a real SGLang server is opt-in: MEMLEDGER_LIVE_SGLANG=1 while one runs",
)


def test_a_running_server_is_told_whole_from_any_of_its_processes():
    server = next(s for s in find_servers() if s.framework == "sglang")
    assert server.framework_version
    assert server.model
    assert server.port
    assert server.metrics.kv_tokens > 0
    assert {"launcher", "scheduler", "detokenizer"} <= {p.role for p in server.processes}
    assert all(attach(p.pid, ask=False).pid == server.pid for p in server.processes)
