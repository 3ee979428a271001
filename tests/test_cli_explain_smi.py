"""`memledger explain LOG --smi FILE`: a thread's log and its pasted nvidia-smi, lined up without a GPU."""

import json

import pytest
from live_cases import FOLDER
from test_cli_explain_pid import memledger

LOG = FOLDER / "demo" / "server.log"
TABLE = """\
Wed Sep  9 18:05:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.172.08             Driver Version: 570.172.08     CUDA Version: 12.8     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:83:00.0 Off |                    0 |
| N/A   52C    P0            628W /  700W |   74250MiB /  81559MiB |    100%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A            4243      C   sglang::scheduler                     72136MiB |
|    0   N/A  N/A            7711      C   python                                 2100MiB |
+-----------------------------------------------------------------------------------------+
"""


@pytest.fixture
def paste(tmp_path):
    file = tmp_path / "smi.txt"
    file.write_text(TABLE)
    return file


def test_a_file_that_is_not_there_costs_the_live_rows_only(tmp_path):
    result = memledger("explain", LOG, "--smi", tmp_path / "none.txt")
    assert result.returncode == 4
    assert "--smi" in result.stderr
    assert "recurrent state" in result.stdout


def test_a_log_and_a_table_close(paste):
    pytest.importorskip("memledger.live.smi")
    result = memledger("explain", LOG, "--smi", paste, "--format", "json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    (gpu,) = found["live"]["gpus"]
    assert gpu["residual"]["verdict"] == "closed"
    assert gpu["memory_call"] == "nvidia-smi"
    (process,) = found["live"]["processes"]
    assert (process["pid"], process["matched"]) == (4243, "title")
    assert [s["name"] for s in found["sources"]][:2] == ["log", "smi"]
    others = [e for e in found["servers"][0]["ranks"][0]["entries"] if e["account"] == "other_processes"]
    assert [e["detail"]["pid"] for e in others] == [7711]


def test_the_report_is_the_same_whenever_it_is_made(paste, tmp_path):
    pytest.importorskip("memledger.live.smi")
    kept = tmp_path / "s.json"
    first = memledger("explain", LOG, "--smi", paste, "--snapshot", kept)
    assert first.returncode == 0
    assert memledger("explain", LOG, "--smi", paste).stdout == first.stdout
    assert memledger("explain", kept).stdout == first.stdout


def test_what_is_no_nvidia_smi_is_said(tmp_path):
    pytest.importorskip("memledger.live.smi")
    file = tmp_path / "smi.txt"
    file.write_text("hello\n")
    result = memledger("explain", LOG, "--smi", file)
    assert result.returncode == 4
    assert "recurrent state" in result.stdout
