"""What an input seems to be when nothing of SGLang or vLLM was recognised in it: named, so that the reader need not guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from memledger.ledger import Evidence
from memledger.sanitize import clean

LOOKED_FOR: Final = (
    "SGLang's server_args=, Load weight, KV Cache is allocated, Memory pool end, Prefill batch and Decode batch lines",
    "vLLM's engine version, Model loading took, GPU KV cache size, Available KV cache memory and Avg prompt throughput lines",
)
"""The markers of the two engines that a report needs, in words."""

_MAGIC: Final = (
    (b"\x7fELF", "an ELF program"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG picture"),
    (b"PK\x03\x04", "a zip archive"),
    (b"SQLite format 3", "an SQLite database"),
    (b"GGUF", "GGUF model weights"),
)
_PROGRAMS: Final = (
    (
        "llama.cpp or Ollama",
        re.compile(
            rb"llama_model_load|llm_load_tensors|load_tensors:|ggml_(?:cuda|backend)|llama_kv_cache|msg=\"llama runner"
        ),
    ),
    ("TensorRT-LLM", re.compile(rb"\[TensorRT-LLM\]|\[TRT-LLM\]|trtllm-serve")),
    ("Text Generation Inference", re.compile(rb"text_generation_(?:launcher|router)")),
    ("LMDeploy", re.compile(rb"lmdeploy - |\[lmdeploy\]|\[TM\]\[")),
    ("Triton Inference Server", re.compile(rb"server\.cc:\d+\]|model_lifecycle\.cc")),
    ("nvidia-smi", re.compile(rb"NVIDIA-SMI \d")),
    ("the kernel (dmesg)", re.compile(rb"(?m)^(?:<\d+>)?\[ *\d+\.\d{6}\]")),
    ("a web server's access log", re.compile(rb"\"(?:GET|POST|HEAD) /[^\"]* HTTP/[\d.]+\" \d{3}")),
    ("a Python traceback", re.compile(rb"Traceback \(most recent call last\)")),
)
_RAN_OUT: Final = re.compile(r"(?i:out of memory|outofmemory)|oom-kill|OOMKilled|ALLOC_FAILED")
_SHOWN: Final = 120
_BAR: Final = re.compile(rb"\d+%[^|\n]{0,20}\|")
_MOST: Final = 0.8
_BINARY_SHARE: Final = 0.05


def spoken_of(examples: Sequence[Evidence], names: Sequence[str]) -> str | None:
    """A sentence on a line that speaks of memory running out and was not read; None where none of the examples does."""
    for example in examples:
        if _RAN_OUT.search(example.text):
            name = "standard input" if names[example.input] == "-" else clean(names[example.input])
            said = example.text if len(example.text) <= _SHOWN else f"{example.text[:_SHOWN]}…"
            return (
                f'{name}, line {example.line}, speaks of memory running out and is not read: no log format known here begins as it does ("{said}"). '
                "Cut off what stands before the message, and give it again."
            )
    return None


def describe(head: bytes, size: int | None = None) -> str:
    """What the first bytes of an input look like, as the end of "it looks like ..."."""
    if size == 0 or not head:
        return "an empty file"
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    text = head.decode("utf-16", "ignore").encode() if head[:2] in {b"\xff\xfe", b"\xfe\xff"} else head
    if not text.strip():
        return "blank lines only"
    odd = sum(1 for byte in text if byte < 9 or 13 < byte < 27 or byte == 127)
    if odd > _BINARY_SHARE * len(text) or b"\0" in text:
        return "binary data"
    for name, pattern in _PROGRAMS:
        if pattern.search(text):
            return f"output of {name}" if not name.startswith("a ") else name
    stripped = text.lstrip()
    if stripped[:1] in {b"{", b"["} and stripped.rstrip()[-1:] in {b"}", b"]"}:
        return "JSON"
    if stripped[:15].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page"
    lines = [line for line in re.split(rb"[\r\n]+", text) if line.strip()]
    if sum(1 for line in lines if _BAR.search(line)) >= _MOST * len(lines):
        return "progress bars only"
    return "text of another program, or a part of a log without any of these lines"
