"""`memledger export`: real retitled processes, a fake driver, a real Prometheus parser; a scrape waits for nothing."""

import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime

import live_tree
import nvml_fake
import pytest
from live_cases import FOLDER, moved, renamed

from memledger.cli import app
from memledger.ledger import Entry, Finding, Gpu, Live, Rank, Report, Residual, Server, Source
from memledger.live.sample import Device, DeviceSample, LiveServer, Sample

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from memledger.export import families, http, sampler
from memledger.export.families import Ledger, Taken, render

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


def taken(ranks=(), *, model="/models/m", findings=(), devices=()):
    server = LiveServer(7, "vllm", model=model)
    sample = Sample("now", sources=(Source("nvml", "ok"),), devices=DeviceSample(Source("nvml", "ok"), devices=devices))
    report = Report("0", (), (), (Server("vllm", ranks=ranks, findings=findings),), live=Live("now", server=0))
    return Taken(1.0, 0.5, sample, (Ledger(server, report),))


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
    page = render(taken((one,)))
    assert labelled(page, "memledger_account_bytes", basis="logged", account="activations", gpu="3", rank="TP0") == [12]
    assert labelled(page, "memledger_account_bytes", basis="live") == [1]
    assert labelled(page, "memledger_residual_bytes", verdict="closed") == [-5]


def test_two_ranks_of_one_name_are_not_summed():
    page = render(
        taken((rank(0, 0, Entry("free", 5, 0, "live"), host="a"), rank(0, 0, Entry("free", 6, 0, "live"), host="b")))
    )
    assert sorted(labelled(page, "memledger_account_bytes", account="free")) == [5, 6]


def test_an_unknown_figure_is_no_series():
    page = render(taken(devices=(Device(index=0, uuid="GPU-1", total_bytes=9),)))
    assert labelled(page, "memledger_gpu_total_bytes", gpu="0") == [9]
    assert "memledger_gpu_free_bytes" not in rows(page)


def test_a_model_name_cant_add_labels_or_series():
    name = 'm"} 1\nmemledger_account_bytes{account="weights/model"} 99\n\x1b[31m\u2028\\'
    page = render(taken(model=name))
    assert "memledger_account_bytes" not in rows(page)
    assert b"\x1b" not in page
    assert len(labelled(page, "memledger_server_info", server="7")) == 1


def test_findings_of_one_code_are_one_series():
    found = tuple(Finding("ML101", "t", "warning", size, "s") for size in (3, 4))
    page = render(taken(findings=found))
    assert labelled(page, "memledger_finding_info", code="ML101", severity="warning") == [1]
    assert labelled(page, "memledger_finding_bytes", code="ML101") == [7]


def test_series_beyond_the_limit_are_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(families, "MOST_SERIES", 2)
    page = render(taken(devices=tuple(Device(index=i, total_bytes=1) for i in range(5))))
    assert len(rows(page)["memledger_gpu_total_bytes"]) == 2
    assert labelled(page, "memledger_series_left_out") == [3]


def test_every_metric_is_named_by_convention():
    for name in families.NAMES:
        assert name.startswith("memledger_")
        assert name.endswith(
            ("_bytes", "_seconds", "_ratio", "_info", "_success", "_tokens", "_slots", "_requests", "_left_out")
        )


def test_a_dead_process_is_said_and_leaves_no_old_figures():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    one = sampler.Sampler(ended.pid, 1)
    assert "no process" in one.once().failed
    assert labelled(one.page(), "memledger_sample_success") == [0]
    assert "memledger_server_info" not in rows(one.page())


def test_figures_too_old_are_left_out(monkeypatch):
    one = sampler.Sampler(1, 1)
    monkeypatch.setattr(one, "_sample", lambda: taken(devices=(Device(index=0, total_bytes=1),)).sample)
    one.once()
    assert labelled(one.page(), "memledger_gpu_total_bytes") == [1]
    monkeypatch.setattr(one, "_done_at", time.monotonic() - 100)
    assert labelled(one.page(), "memledger_sample_success") == [0]
    assert "memledger_gpu_total_bytes" not in rows(one.page())


@pytest.fixture
def served():
    """Starts an endpoint for a function that gives the page; gives its address."""
    running = []

    def start(page):
        server = http.server("127.0.0.1", 0, page)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def scrape(address):
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read()


def test_a_scrape_does_not_wait_for_a_sample_that_hangs(served, monkeypatch):
    one = sampler.Sampler(1, 1)
    hangs = threading.Event()
    monkeypatch.setattr(one, "_sample", hangs.wait)
    one.start()
    address = served(one.page)
    begun = time.monotonic()
    assert labelled(scrape(f"{address}/metrics"), "memledger_sample_success") == [0]
    assert time.monotonic() - begun < 1
    one.stop()
    hangs.set()


def test_a_scrape_of_eight_gpus_takes_under_50_ms(served, monkeypatch):
    ranks = tuple(
        rank(n, n, *(Entry(a, 1, 0, "logged") for a in ("weights/model", "free", "kv_cache/k", "activations") * 4))
        for n in range(8)
    )
    whole = taken(ranks, devices=tuple(Device(index=n, total_bytes=1) for n in range(8)))
    one = sampler.Sampler(1, 1)
    monkeypatch.setattr(one, "_sample", lambda: whole.sample)
    monkeypatch.setattr(one._ledgers, "of", lambda sample: whole.ledgers)
    one.once()
    address = served(one.page)
    times = []
    for _ in range(5):
        begun = time.monotonic()
        page = scrape(f"{address}/metrics")
        times.append(time.monotonic() - begun)
    assert len(labelled(page, "memledger_account_bytes", account="free")) == 8
    assert min(times) < 0.05


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert app.run(["export"]) == 2
    assert "pip install 'gpu-memledger[prometheus]'" in capsys.readouterr().err


def test_a_running_server_to_a_file_in_one_step(tmp_path):
    arguments = ["/models/example-70b-fp8", "--port", "8123"]
    with live_tree.tree(tmp_path, "vllm serve", arguments, live_tree.VLLM_TP2) as running:
        pids = running.pids
        ids = {190: pids["VLLM::Worker_TP0"], 191: pids["VLLM::Worker_TP1"], 171: pids["VLLM::EngineCore"]}
        with (tmp_path / "server.log").open("a") as log:
            log.write(renamed(moved(VLLM_LOG, datetime.now().replace(microsecond=0)), ids))
        scenario = (FOLDER / "live-vllm-tp2" / "nvml.ini").read_text()
        for old, new in ids.items():
            scenario = scenario.replace(f"compute {old} ", f"compute {new} ")
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
