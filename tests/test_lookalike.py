"""What an input seems to be when nothing was recognised in it."""

import pytest

from memledger.ledger import Evidence
from memledger.lookalike import LOOKED_FOR, describe, spoken_of


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"", "an empty file"),
        (b"  \n\n", "blank lines only"),
        (b"\x7fELF\x02" + bytes(20), "an ELF program"),
        (b"GGUF\x03\x00\x00\x00", "GGUF model weights"),
        (b"some text\0with zeros", "binary data"),
        (b"llama_kv_cache: size = 512.00 MiB\n", "output of llama.cpp or Ollama"),
        (b"[TensorRT-LLM] TensorRT-LLM version: 1.0\n", "output of TensorRT-LLM"),
        (b"| NVIDIA-SMI 550.54   Driver Version: 550.54 |\n", "output of nvidia-smi"),
        (b"[    0.000000] Linux version 6.8\n", "output of the kernel (dmesg)"),
        (b'10.0.0.1 - - [x] "GET / HTTP/1.1" 200 5\n', "a web server's access log"),
        (b"Traceback (most recent call last):\n", "a Python traceback"),
        (b'{"a": 1}\n', "JSON"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b" 10%|#  | 1/10 [00:01<00:09]\r 20%|## | 2/10\n", "progress bars only"),
        (
            "text in UTF-16\r\n".encode("utf-16"),
            "text of another program, or a part of a log without any of these lines",
        ),
        (b"hello\n", "text of another program, or a part of a log without any of these lines"),
    ],
)
def test_describe(head, name):
    assert describe(head) == name


def test_a_size_of_nothing_is_an_empty_file():
    assert describe(b"", 0) == "an empty file"


def test_both_engines_are_looked_for():
    assert [text.split("'")[0] for text in LOOKED_FOR] == ["SGLang", "vLLM"]


def test_a_line_that_speaks_of_memory_running_out_and_is_not_read_is_shown():
    said = Evidence(0, 7, "node7: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB." + "x" * 200)
    sentence = spoken_of((Evidence(0, 1, "pool of 3 GiB"), said), ["server\x1b.log"])
    assert sentence.startswith(
        "server\ufffd.log, line 7, speaks of memory running out and is not read: no log format known here begins"
    )
    assert '("node7: torch.OutOfMemoryError: CUDA out of memory.' in sentence
    assert "x…" in sentence
    assert spoken_of((Evidence(0, 1, "pool of 3 GiB"),), ["-"]) is None
    assert spoken_of((said,), ["-"]).startswith("standard input, line 7")
