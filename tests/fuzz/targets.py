"""What a fuzzer feeds: every target takes any bytes, and raises only where memledger is at fault.

A target reads the bytes as one kind of input, allows the refusals that are documented for it (one sentence each), goes on with
what was read to the end of the program (findings, text, Markdown, JSON), and checks what holds of every output: no character that
acts on a terminal or hides text. `run.py` puts atheris before them; `tests/test_security_fuzz.py` gives them the kept corpus.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger import pipeline
from memledger.conclude import complete
from memledger.findings import live as live_findings
from memledger.grammar import GrammarError, RuleSet, load_rules, parsers_folder
from memledger.ledger import Report, Source
from memledger.live import attach, endpoints, smi, snapshot
from memledger.live.sample import DeviceSample, Sample
from memledger.live.snapshot import SnapshotError
from memledger.model import kv, state, weights
from memledger.model.architecture import Architecture, NotModelledError, Parallel
from memledger.model.find import ModelConfigError, read_file
from memledger.postmortem import unpickle
from memledger.prefix import MOST_RECORDS, prefix_rules, records
from memledger.reconcile import reconcile
from memledger.report import markdown, text
from memledger.report.json import encode
from memledger.sanitize import clean
from memledger.scan import Scanner

LARGEST: Final = 64 * 2**10
"""Bytes of an input; what is longer finds nothing that is shorter does not."""

_HIDING: Final = frozenset("\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


@functools.lru_cache(maxsize=1)
def rules() -> RuleSet:
    """The bundled rules."""
    return load_rules()


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="memledger-fuzz-", dir=shared if shared.is_dir() else None)


def file(data: bytes, name: str = "input") -> Path:
    """A file with these bytes, in memory where that is to be had."""
    path = Path(_folder().name, name)
    path.write_bytes(data)
    return path


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, its keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from strings(key)
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def acting(shown: str) -> list[str]:
    """The characters of an output that act on a terminal or hide text; line ends are none."""
    return [
        c for c in set(shown) if c != "\n" and (unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} or c in _HIDING)
    ]


def check_report(report: Report) -> None:
    """A report in every format, and what holds of each."""
    for shown in (text.render(report), markdown.render(report)):
        assert not acting(shown), shown
    document = json.loads(encode(report), parse_constant=_no_number)
    assert not [one for one in strings(document) if acting(one)]


def _no_number(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def scan(data: bytes) -> None:
    """A log: any encoding, compressed or not."""
    got = pipeline.read([str(file(data))], rules())
    check_report(complete(got.report, None))


def blocks(data: bytes) -> None:
    """Where the blocks of a stream end does not matter."""
    whole = _events([data])
    size = 1 + (data[0] if data else 0) * 7
    assert _events([data[at : at + size] for at in range(0, len(data), size)]) == whole
    assert not any(acting(event[-1]) for event in whole[0])


def _events(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], object]:
    scanner = Scanner(rules())
    found = [(e.rule.full_id, str(e.fields), e.line, e.prefix, e.text) for e in scanner.events(iter(pieces), 0)]
    return found, scanner.unrecognized.count


def prefix(data: bytes) -> None:
    """A line."""
    line = data.decode("utf-8", "replace").replace("\n", " ").replace("\r", " ")
    found = records(line)
    assert 0 < len(found) <= 2 * MOST_RECORDS
    assert len(clean(line)) <= len(line)


def smi_text(data: bytes) -> None:
    """A pasted `nvidia-smi`, beside a log that is read with it."""
    try:
        sample = smi.read_smi(data)
    except ValueError as error:
        assert _is_sentence(str(error))
        return
    _beside_log(sample)


def _beside_log(devices: DeviceSample) -> None:
    sample = Sample(taken_at="", sources=(devices.source,), devices=devices, host_pids=True)
    check_report(live_findings.attach(reconcile(_log_report(), sample)))


@functools.lru_cache(maxsize=1)
def _log_report() -> Report:
    log = parsers_folder().parent / "fixtures" / "demo"
    found = sorted(log.glob("*.log"))
    report = pipeline.explain([str(found[0])], rules()) if found else Report("0", (), (Source("log", "ok"),), ())
    return complete(report, None)


def snapshot_file(data: bytes) -> None:
    """Somebody else's snapshot."""
    try:
        taken = snapshot.read(str(file(data)))
    except SnapshotError as error:
        assert _is_sentence(str(error))
        return
    if taken.report is not None:
        report = reconcile(taken.report, taken.sample, pid=taken.pid, own_log=taken.own_log, built=taken.built)
        check_report(live_findings.attach(report))


def config(data: bytes) -> None:
    """A model's `config.json`."""
    try:
        found = read_file(file(data, "config.json"))
    except ModelConfigError as error:
        assert _is_sentence(str(error))
        return
    _sizes(found)


def _sizes(arch: Architecture) -> None:
    for parallel in (Parallel(), Parallel(tp=2)):
        for size in (
            lambda p=parallel: weights.weight_bytes(arch, p, "vllm").bytes,
            lambda p=parallel: weights.weight_bytes(arch, p, "sglang").bytes,
            lambda p=parallel: kv.model_token_bytes(arch, p, framework="vllm"),
            lambda p=parallel: state.slot_bytes(arch, p, "float16", "float32").total,
        ):
            try:
                assert size() >= 0
            except NotModelledError as error:
                assert _is_sentence(clean(str(error)))


def pickled(data: bytes) -> None:
    """A memory snapshot of torch. What the loader raises is the loader's; what it gives is ours."""
    try:
        loaded = unpickle._Unpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, MemoryError, RecursionError):
        return
    except Exception:
        # A damaged pickle makes the loader raise anything: in the program that is a process of its own, and one sentence.
        return
    try:
        found = unpickle.summary(loaded)
    except unpickle.NotASnapshotError as error:
        assert _is_sentence(str(error))
        return
    except (MemoryError, RecursionError, OverflowError):
        return
    document = json.loads(msgspec.json.encode(found))
    assert not [one for one in strings(document) if acting(one)]


def endpoint(data: bytes) -> None:
    """What listens on a server's port and answers anything."""
    for framework, paths in (("sglang", ("/metrics", "/server_info", "/v1/loads")), ("vllm", ("/metrics", "/version"))):
        answers = tuple(endpoints._answer(path, 200, HTTPMessage(), data) for path in paths)
        attach._usage(framework, answers)
        document = json.loads(msgspec.json.encode(answers))
        assert not [one for one in strings(document) if acting(one)]


def rule_file(data: bytes) -> None:
    """A user's rule file, with the lines of its own samples."""
    try:
        own = load_rules([file(data, "rules.toml")])
    except GrammarError as error:
        assert str(error)
        return
    lines = [sample.line for rule in own.rules[:20] for sample in rule.sample]
    list(Scanner(own).events(iter(["\n".join(lines).encode("utf-8", "replace")]), 0))


def _is_sentence(said: str) -> bool:
    return bool(said) and not acting(said) and "\n" not in said


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "scan": scan,
    "blocks": blocks,
    "prefix": prefix,
    "smi": smi_text,
    "snapshot": snapshot_file,
    "config": config,
    "pickle": pickled,
    "endpoint": endpoint,
    "rules": rule_file,
}

JSON_TARGETS: Final = ("snapshot", "config")


# ------------------------------------------------------------------------------------------------------------- beginnings


def seeds(name: str) -> Iterator[bytes]:
    """Inputs that a target understands, made of the rules' own samples and the small fixtures."""
    if name in {"scan", "blocks"}:
        yield from (one for one in _fixtures("*.log") if len(one) <= LARGEST)
        yield from _sample_lines()
    elif name == "prefix":
        yield from (sample.line.encode() for rule in prefix_rules() for sample in rule.sample)
    elif name == "smi":
        yield from (one for pattern in ("*smi*.txt", "smi/*") for one in _fixtures(pattern))
    elif name == "config":
        yield from (json.dumps(one).encode() for one in _configs())
    elif name == "snapshot":
        yield from _snapshots()
    elif name == "pickle":
        yield from _pickles()
    elif name == "endpoint":
        yield from _ANSWERS
    elif name == "rules":
        yield from (path.read_bytes()[:LARGEST] for path in sorted(parsers_folder().glob("*.toml")))


def words(name: str) -> Iterator[bytes]:
    """What random bytes rarely come upon."""
    if name in {"scan", "blocks"}:
        yield from (anchor.encode() for anchor in rules().anchors)
    if name in {"scan", "blocks", "prefix"}:
        yield from (
            b'{"log":"',
            b'","stream":"stderr"}',
            b"\\n",
            b"\r",
            b"\x1b[36m",
            b"(EngineCore pid=7) ",
            b" TP0]",
            b"| ",
        )
    if name == "rules":
        yield from (
            b"[[rule]]",
            b"[[rule.sample]]",
            b"framework",
            b"anchor",
            b"pattern",
            b"fields",
            b"expect",
            b"(?<n>",
        )
    if name in {"snapshot", "config"}:
        yield from (b"null", b"true", b"1e999", b"-1", b"9223372036854775807", b"[]", b"{}", b"\\ud800", b"\\u202e")


def _fixtures(pattern: str) -> Iterator[bytes]:
    top = Path(__file__).resolve().parents[2]
    yield from (
        path.read_bytes() for name in ("fixtures", "tests/data") for path in sorted((top / name).rglob(pattern))
    )


def _sample_lines() -> Iterator[bytes]:
    """The samples of each rule file, twenty lines at a time."""
    lines = [sample.line for rule in rules().rules for sample in rule.sample]
    for at in range(0, len(lines), 20):
        yield "\n".join(lines[at : at + 20]).encode()


def _configs() -> Iterator[dict[str, Any]]:
    dense = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    yield {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", **dense}
    yield {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
           "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 8,
           "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, **dense}  # fmt: skip
    yield {"model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
           "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **dense}  # fmt: skip
    yield {
        "model_type": "gemma3",
        "text_config": {**dense, "sliding_window": 128, "sliding_window_pattern": 6, "head_dim": 16},
    }
    yield {
        "model_type": "llama",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        **dense,
    }


def _snapshots() -> Iterator[bytes]:
    report = _log_report()
    yield snapshot.encode(snapshot.Snapshot(snapshot.SCHEMA, "0", Sample(taken_at=""), report=report))
    for one in _fixtures("*smi*.txt"):
        devices = smi.read_smi(one)
        sample = Sample(taken_at="", sources=(devices.source,), devices=devices, host_pids=True)
        yield snapshot.encode(snapshot.Snapshot(snapshot.SCHEMA, "0", sample, report=report))


def _pickles() -> Iterator[bytes]:
    frames = [{"filename": "/x/vllm/worker.py", "line": 7, "name": "run"}]
    blocks = [
        {"size": 512, "state": one, "frames": frames} for one in ("active_allocated", "inactive", "active_pending_free")
    ]
    segment = {
        "device": 0,
        "total_size": 2**21,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 1),
        "blocks": blocks,
    }
    trace = [{"action": "oom", "size": 2**30, "device_free": 7, "frames": frames, "stream": 0}]
    whole = {"segments": [segment], "device_traces": [trace], "allocator_settings": {"expandable_segments": True}}
    for protocol in (2, 4, 5):
        yield pickle.dumps(whole, protocol)
    yield pickle.dumps([{**segment, "blocks": [{"size": 1, "state": "inactive", "history": [{"frames": frames}]}]}], 2)


_ANSWERS: Final = (
    b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n',
    b'sglang:num_running_reqs{tp_rank="0"} 1.0\nsglang:token_usage{tp_rank="0"} 0.25\nsglang:max_total_num_tokens{tp_rank="0"} 1e6\n',
    b'{"version": "0.5.18", "model_path": "/m", "internal_states": [{"memory_usage": {"kvcache": 1.5}, "max_running_requests": 8}]}',
    b'{"loads": [{"dp_rank": 0, "num_running_reqs": 1, "token_usage": 0.5, "max_total_num_tokens": 1000}], "version": "0.32.0"}',
)


# -------------------------------------------------------------------------------------------------------------- mutations

_ODD: Final = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.5, 1.5, 1e308, "", "x", "0", "None", "\u202e",
    "\x1b[2J", "api_key=abcdefgh", "weights/model", "free", "host/x", "a" * 5000, [], [[]], [None], {}, {"": None}, {"x": {"y": []}},
)  # fmt: skip


def mutated_json(data: bytes, draw: random.Random) -> bytes:
    """The document with one to four of its values replaced, removed, doubled, or moved."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = {}
    for _ in range(draw.randint(1, 4)):
        places = list(_places(document))
        if not places:
            break
        holder, key = draw.choice(places)
        how = draw.random()
        if how < 0.5:
            holder[key] = copy.deepcopy(draw.choice(_ODD))
        elif how < 0.65:
            del holder[key]
        elif how < 0.8:
            other, place = draw.choice(places)
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[draw.choice(("", "rows", "stage", "account", "modelled", "quantization_config", "layer_types"))] = (
                holder[key]
            )
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document that holds a value: (what holds it, its key or index)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
