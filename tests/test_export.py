"""`memledger export`: real retitled processes, a fake driver, a real Prometheus parser; a scrape waits for nothing."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime

import live_tree
import msgspec
import nvml_fake
import pytest
from live_cases import FOLDER, moved, renamed

from memledger.cli import app
from memledger.ledger import Capacity, Engine, Entry, Finding, Gpu, Live, Rank, Report, Residual, Server, Source, Usage
from memledger.live.sample import Device, DeviceSample, LiveServer, Metrics

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from memledger.export import families, http, logs, sampler, server
from memledger.export.families import Answer, Ledger, Page, render

ROOT = FOLDER.parent
VLLM_LOG = (FOLDER / "vllm-0.31-tp2" / "server.log").read_text()


def rows(page):
    """{name: {labels without order: value}} by a real parser."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for one in family.samples:
            found.setdefault(one.name, {})[frozenset(one.labels.items())] = one.value
    return found


def labelled(page, name, **labels):
    return [value for key, value in rows(page).get(name, {}).items() if labels.items() <= dict(key).items()]


def page_of(ranks=(), *, pid=7, model="/models/m", findings=(), devices=(), usage=None, metrics=None):
    server = LiveServer(pid, "vllm", model=model, metrics=metrics)
    report = Report(
        "0",
        (),
        (),
        (Server("vllm", ranks=ranks, findings=findings, usage=usage or Usage()),),
        live=Live("now", server=0),
    )
    ledger = Ledger(pid, 0.0, server, report, (Answer("ledger", True),))
    seen = DeviceSample(Source("nvml", "ok"), devices=devices)
    return Page(1.0, 0.5, 0.0, seen, (seen.source,), (ledger,))


def rank(tp, index, *entries, **more):
    return Rank(tp=tp, gpu=Gpu(index=index), entries=entries, residual=Residual("device", -5, 1, "closed"), **more)


def test_entries_of_one_account_are_summed_and_bases_kept_apart():
    one = rank(
        0,
        3,
        Entry("activations", 5, 0, "logged"),
        Entry("activations", 7, 0, "logged"),
        Entry("activations", 1, 0, "live"),
    )
    page = render(page_of((one,)))
    assert labelled(page, "memledger_account_bytes", basis="logged", account="activations", gpu="3", rank="TP0") == [12]
    assert labelled(page, "memledger_account_bytes", basis="live") == [1]
    assert labelled(page, "memledger_residual_bytes", rank="TP0") == [-5]
    assert labelled(page, "memledger_residual_tolerance_bytes", rank="TP0") == [1]
    assert labelled(page, "memledger_residual_verdict_info", verdict="closed") == [1]


def test_two_ranks_of_one_name_are_not_summed():
    page = render(
        page_of((rank(0, 0, Entry("free", 5, 0, "live"), host="a"), rank(0, 0, Entry("free", 6, 0, "live"), host="b")))
    )
    assert sorted(labelled(page, "memledger_account_bytes", account="free")) == [5, 6]


def test_an_unknown_figure_is_no_series():
    page = render(page_of(devices=(Device(index=0, uuid="GPU-1", total_bytes=9),)))
    assert labelled(page, "memledger_gpu_total_bytes", gpu="0") == [9]
    assert "memledger_gpu_free_bytes" not in rows(page)


def test_a_model_name_cant_add_labels_or_series():
    name = 'm"} 1\nmemledger_account_bytes{account="weights/model"} 99\n\x1b[31m\u2028\\'
    page = render(page_of(model=name))
    assert "memledger_account_bytes" not in rows(page)
    assert b"\x1b" not in page
    assert len(labelled(page, "memledger_server_info", server="7")) == 1


def test_findings_of_one_code_are_one_series():
    found = tuple(Finding("ML101", "t", "warning", size, "s") for size in (3, 4))
    page = render(page_of(findings=found))
    assert labelled(page, "memledger_finding_info", code="ML101", severity="warning", title="state slots idle") == [1]
    assert labelled(page, "memledger_finding_bytes", code="ML101") == [7]


def test_series_beyond_the_limit_are_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(families, "MOST_SERIES", 2)
    page = render(page_of(devices=tuple(Device(index=i, total_bytes=1) for i in range(5))))
    assert len(rows(page)["memledger_gpu_total_bytes"]) == 2
    assert labelled(page, "memledger_series_left_out") == [3]


def test_every_metric_is_named_by_convention():
    for name in families.NAMES:
        assert name.startswith("memledger_")
        assert name.endswith(
            (
                *("_bytes", "_seconds", "_ratio", "_info", "_success", "_tokens", "_slots", "_requests", "_left_out"),
                "_total",
            )
        )


def test_use_now_peaks_and_counters_are_kept_apart():
    page = render(
        page_of(
            usage=Usage(peak_running_requests=9, peak_kv_usage=0.5, retractions=2),
            metrics=Metrics(running_requests=3, queued_requests=1, kv_usage=0.25, state_usage=0.125, preemptions=4),
        )
    )
    seen = {name: list(found.values()) for name, found in rows(page).items()}
    assert seen["memledger_running_requests"] == [3]
    assert seen["memledger_queued_requests"] == [1]
    assert seen["memledger_kv_usage_ratio"] == [0.25]
    assert seen["memledger_state_usage_ratio"] == [0.125]
    assert seen["memledger_peak_running_requests"] == [9]
    assert seen["memledger_peak_kv_usage_ratio"] == [0.5]
    assert seen["memledger_preemptions_total"] == [4]
    assert seen["memledger_retractions_total"] == [2]
    assert "memledger_peak_queued_requests" not in seen
    assert b"# TYPE memledger_preemptions_total counter" in page


def everything():
    """A page with a series of every metric, eight GPUs, and all that a label may hold."""
    accounts = ("weights/model", "kv_cache/k", "kv_cache/v", "cuda_graphs/decode", "activations", "free")
    ranks = tuple(
        rank(n, n, *(Entry(a, 2**34 + n, 0, basis) for a in accounts for basis in ("logged", "live"))) for n in range(8)
    )
    devices = tuple(
        Device(index=n, uuid=f"GPU-{n}", total_bytes=4, reserved_bytes=1, used_bytes=2, free_bytes=1) for n in range(8)
    )
    capacity = Capacity(kv_tokens=5, state_slots=6, max_running_requests=7)
    usage = Usage(
        peak_running_requests=1, peak_queued_requests=1, peak_kv_usage=0.5, peak_state_usage=0.5, retractions=1
    )
    metrics = Metrics(running_requests=1, queued_requests=1, kv_usage=0.5, state_usage=0.5, preemptions=1)
    findings = (Finding("ML101", "t", "warning", 1, "s"),)
    page = page_of(ranks, devices=devices, usage=usage, metrics=metrics, findings=findings, model='a"b\\c\n{d}')
    (ledger,) = page.ledgers
    (one,) = ledger.report.servers
    one = msgspec.structs.replace(one, engines=(Engine(dp=0, capacity=capacity),))
    report = msgspec.structs.replace(ledger.report, servers=(one,))
    return msgspec.structs.replace(page, ledgers=(msgspec.structs.replace(ledger, report=report),))


def test_every_metric_that_is_named_can_be_made():
    assert set(rows(render(everything()))) == set(families.NAMES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_finds_nothing_to_say():
    done = subprocess.run(
        ["promtool", "check", "metrics"], check=False, input=render(everything()), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "text", ['"', "\\", "\n", "\r", "\x00", "\x1b[2J", "\u2028", '"} 1\nx{y="', "{", "}", "#", "\\n", "é"]
)
def test_text_from_outside_stays_within_its_label(text):
    text = f"a{text}b"
    entry = Entry(text, 5, 0, "logged")
    page = render(page_of((rank(0, 0, entry),), model=text, devices=(Device(index=0, uuid=text, total_bytes=9),)))
    assert set(rows(page)) <= set(families.NAMES)
    for name in ("memledger_account_bytes", "memledger_server_info", "memledger_gpu_total_bytes"):
        assert len(rows(page)[name]) == 1
    (labels,) = rows(page)["memledger_server_info"]
    model = dict(labels)["model"]
    assert model.startswith("a")
    assert model.endswith("b")
    assert not any(ord(letter) < 32 for letter in model)


def test_a_dead_process_is_said_and_the_machine_is_still_shown():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said = []
    with nvml_fake.installed(FOLDER / "live-vllm-tp2" / "nvml.ini"):
        one = sampler.Sampler(ended.pid, 1, say=said.append)
        page = one.once(5)
    assert "no process" in one.failed
    assert said == [one.failed]
    assert labelled(page, "memledger_sample_success") == [0]
    assert labelled(page, "memledger_source_success", source="nvml") == [1]
    assert labelled(page, "memledger_source_success", source="proc") == [1]
    assert len(labelled(page, "memledger_gpu_total_bytes")) == 2
    assert "memledger_server_info" not in rows(page)


def test_a_machine_without_a_driver_is_a_source_that_did_not_answer():
    plain = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    words = [sys.executable, "-m", "memledger", "export", "--once", "--no-ask"]
    done = subprocess.run(words, check=False, capture_output=True, cwd=ROOT, timeout=120, env=plain)
    if labelled(done.stdout, "memledger_gpu_total_bytes"):
        pytest.skip("this machine has an NVIDIA driver")
    assert done.returncode == 0
    assert labelled(done.stdout, "memledger_source_success", source="nvml") == [0]
    assert labelled(done.stdout, "memledger_sample_success") == [1]


def test_figures_too_old_are_left_out():
    one = sampler.Sampler(1, 1)
    one._machine = page_of(devices=(Device(index=0, total_bytes=1),))
    one.put_together()
    assert labelled(one.page(), "memledger_sample_success") == [0]
    assert "memledger_gpu_total_bytes" not in rows(one.page())
    late = server.with_age_checked(page_of().ledgers[0], oldest=1.0)
    assert (late.server, late.report, late.answers[0].ok) == (None, None, False)


def test_a_page_that_nobody_makes_any_more_says_so(monkeypatch):
    one = sampler.Sampler(1, 1)
    one._machine = msgspec.structs.replace(
        page_of(devices=(Device(index=0, total_bytes=1),)), looked_at=time.monotonic()
    )
    one.put_together()
    assert labelled(one.page(), "memledger_gpu_total_bytes") == [1]
    monkeypatch.setattr(one, "_rendered_at", time.monotonic() - 100)
    assert labelled(one.page(), "memledger_sample_success") == [0]
    assert "memledger_gpu_total_bytes" not in rows(one.page())


@pytest.fixture
def served():
    """Starts an endpoint for a function that gives the page; gives its address."""
    running = []

    def start(page):
        endpoint = http.server("127.0.0.1", 0, page)
        threading.Thread(target=endpoint.serve_forever, args=(0.05,), daemon=True).start()
        running.append(endpoint)
        return f"http://127.0.0.1:{endpoint.server_port}"

    yield start
    for endpoint in running:
        endpoint.shutdown()
        endpoint.server_close()


GENEROUS_S = 60.0
"""How long a condition is waited for: a loaded machine is slow, and no test waits longer than it must."""


def wait_for(condition):
    """Whether it came true in time."""
    ends = time.monotonic() + GENEROUS_S
    while not (came := condition()) and time.monotonic() < ends:
        time.sleep(0.05)
    return came


def scrape(address):
    with urllib.request.urlopen(address, timeout=GENEROUS_S) as answer:
        return answer.read()


def test_a_scrape_does_not_wait_for_a_look_that_hangs(served, monkeypatch):
    one = sampler.Sampler(1, 1)
    hangs, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(one._look, "devices", lambda: (begun.set(), hangs.wait()))
    one.start()
    try:
        assert begun.wait(GENEROUS_S)
        page = scrape(served(one.page) + "/metrics")
        assert not hangs.is_set()
        assert labelled(page, "memledger_sample_success") == [0]
    finally:
        one.stop()
        hangs.set()


def test_a_scrape_of_eight_gpus_takes_under_50_ms(served):
    one = sampler.Sampler(1, 1)
    one._page = render(everything())
    address = served(one.page)
    times = []
    for _ in range(20):
        begun = time.monotonic()
        page = scrape(f"{address}/metrics")
        times.append(time.monotonic() - begun)
        if times[-1] < 0.05:
            break
    assert len(labelled(page, "memledger_account_bytes", account="free", basis="live")) == 8
    assert min(times) < 0.05


def test_connections_beyond_the_limit_are_closed_and_later_ones_answered(served, monkeypatch):
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 2)
    address = served(lambda: b"x 1\n")
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(("127.0.0.1", port)) as two:
        with socket.create_connection(("127.0.0.1", port), timeout=GENEROUS_S) as third:
            assert third.recv(1) == b""
        del one, two
    assert wait_for(lambda: _answers(address))


def _answers(address):
    try:
        return scrape(f"{address}/metrics") == b"x 1\n"
    except OSError:
        return False


def test_another_path_is_not_found(served):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(served(lambda: b"") + "/etc/passwd")


@pytest.mark.parametrize("listen", ["9841", ":1", "h:x", "h:70000"])
def test_an_address_that_is_none_is_wrong_usage(listen, capsys):
    assert app.run(["export", "--listen", listen]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_a_port_in_use_is_said(served, capsys):
    address = served(lambda: b"").removeprefix("http://")
    assert app.run(["export", "--listen", address]) == 4
    assert "in use" in capsys.readouterr().err


def test_without_prometheus_client_the_command_that_installs_it_is_said(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "prometheus_client" else there(name))
    assert app.run(["export"]) == 2
    assert "-m pip install 'prometheus_client>=0.20'" in capsys.readouterr().err


VLLM_ARGUMENTS = ("/models/example-70b-fp8", "--port", "8123")
CAPACITY = "memledger_kv_capacity_tokens"


def its_log(running, text=VLLM_LOG):
    """The fixture's log as if the running processes had written it now, and the driver's list of them."""
    pids = running.pids
    ids = {190: pids["VLLM::Worker_TP0"], 191: pids["VLLM::Worker_TP1"], 171: pids["VLLM::EngineCore"]}
    scenario = (FOLDER / "live-vllm-tp2" / "nvml.ini").read_text()
    for old, new in ids.items():
        scenario = scenario.replace(f"compute {old} ", f"compute {new} ")
    return renamed(moved(text, datetime.now().replace(microsecond=0)), ids), scenario


def append(path, text):
    with path.open("a") as log:
        log.write(text)


@contextlib.contextmanager
def sampling(pid, scenario, **more):
    """A sampler that looks every second, with the driver of a scenario."""
    said = []
    with nvml_fake.installed(scenario):
        one = sampler.Sampler(pid, 1, say=said.append, **more)
        one.said = said
        one.start()
        try:
            yield one
        finally:
            one.stop()


def series(one, name, **labels):
    return labelled(one.page(), name, **labels)


def test_a_log_is_read_on_from_where_it_stopped_through_truncation_and_rotation(tmp_path):
    path = tmp_path / "server.log"
    peak = "memledger_peak_running_requests"
    with live_tree.tree(tmp_path, "vllm serve", VLLM_ARGUMENTS, live_tree.VLLM_TP2) as running:
        text, scenario = its_log(running)
        append(path, text)
        lines = [line for line in text.splitlines() if "Running: " in line]
        template = re.sub(r"Running: \d+ reqs", "Running: {} reqs", lines[-1]) + "\n"
        with sampling(running.root, scenario, ask=False) as one:
            assert wait_for(lambda: series(one, CAPACITY) and series(one, peak)), one.page().decode()
            before = series(one, peak)[0]
            (thread,) = one._servers.values()
            append(path, template.format(1111))
            assert wait_for(lambda: series(one, peak) == [1111]), before
            # Read again, it would have counted the first part twice.
            assert thread._log.state().report.inputs[0].bytes == path.stat().st_size
            os.truncate(path, 0)
            append(path, template.format(2222))
            assert wait_for(lambda: series(one, peak) == [2222])
            path.rename(tmp_path / "server.log.1")
            path.write_text(template.format(3333))
            # The server's own file has another name now: that log is read, and its successor is none of the server's.
            assert wait_for(lambda: thread._log is not None and thread._log.path.endswith("server.log.1"))
            assert one.said == []


def test_one_server_that_hangs_and_one_whose_ledger_fails_take_nothing_from_the_third(tmp_path, monkeypatch, served):
    real = server.reconcile
    hang = {path: {"how": "hang"} for path in ("/version", "/metrics", "/v1/models")}
    with contextlib.ExitStack() as stack:

        def start(name, **more):
            folder = tmp_path / name
            return stack.enter_context(live_tree.tree(folder, "vllm serve", VLLM_ARGUMENTS, live_tree.VLLM_TP2, **more))

        good, broken, slow = start("good"), start("broken"), start("slow", port=live_tree.free_port(), pages=hang)
        text, scenario = its_log(good)
        append(tmp_path / "good" / "server.log", text)

        def fails(report, sample, **how):
            if how["pid"] == broken.root:
                raise ValueError("a report that can't be made")
            return real(report, sample, **how)

        # A port that answers only when it is told to.
        told = threading.Event()
        stack.callback(told.set)
        describe = server.attach.describe

        def described(scan, tree, *rest, **how):
            if tree.root.pid == slow.root:
                told.wait(GENEROUS_S)
            return describe(scan, tree, *rest, **how)

        monkeypatch.setattr(server, "reconcile", fails)
        monkeypatch.setattr(server.attach, "describe", described)
        with sampling(None, scenario) as one:
            assert wait_for(lambda: series(one, CAPACITY, server=str(good.root)))
            page = scrape(served(one.page) + "/metrics")
            assert not labelled(page, "memledger_server_info", server=str(slow.root))
            assert wait_for(lambda: any("can't be made" in sentence for sentence in one.said))
            failed = {"server": str(broken.root), "source": "ledger"}
            assert wait_for(lambda: series(one, "memledger_server_source_success", **failed) == [0])
            told.set()
            assert wait_for(lambda: series(one, "memledger_server_info", server=str(slow.root)) == [1])
            metrics = {"server": str(slow.root), "source": "metrics"}
            assert wait_for(lambda: series(one, "memledger_server_source_success", **metrics) == [0])
            good.program.kill()
            for pid in good.pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda: not series(one, CAPACITY, server=str(good.root)))


def test_a_log_that_cant_be_read_is_a_source_without_success_and_is_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "server.log"
    monkeypatch.setattr(logs, "RETRY_S", 0.0)
    one = logs.FollowedLog(str(path), 0.01)
    assert wait_for(lambda: one.state().problem is not None)
    path.write_text(VLLM_LOG)
    assert wait_for(lambda: one.state().report is not None and one.state().report.servers)
    one.close()


def test_a_running_server_to_a_file_in_one_step(tmp_path):
    with live_tree.tree(tmp_path, "vllm serve", VLLM_ARGUMENTS, live_tree.VLLM_TP2) as running:
        text, scenario = its_log(running)
        append(tmp_path / "server.log", text)
        file = tmp_path / "memledger.prom"
        words = ["export", "--pid", str(running.root), "--once", "--no-ask", "--textfile", str(file)]
        done = subprocess.run(
            [sys.executable, "-m", "memledger", *words],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            env={**os.environ, **nvml_fake.environment(scenario)},
        )
    assert (done.returncode, done.stderr) == (0, "")
    page = file.read_bytes()
    for label, gpu in (("TP0", "0"), ("TP1", "1")):
        assert labelled(page, "memledger_account_bytes", rank=label, gpu=gpu, account="kv_cache/pool") != []
    assert labelled(page, "memledger_source_success", source="nvml") == [1]
    assert not list(tmp_path.glob(".memledger*"))
