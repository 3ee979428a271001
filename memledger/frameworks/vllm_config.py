"""vLLM's configuration: argument dumps, the engine's dump, single lines and echoed command lines to contract names.

`config` holds what was asked for or printed; engine defaults are never filled in. Order of trust: what the engine says
it resolved (its dump) for dtypes, prefix caching and lengths; what the user gave (args) for everything that the dump
lacks or, with data parallelism, repeats per engine (its `data_parallel_size` may be 1); command lines last.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from memledger.events import Event
from memledger.frameworks import arguments
from memledger.frameworks.arguments import (
    as_flag,
    as_text,
    parse_call,
    parse_command_line,
    parse_literal,
    parse_pairs,
)

_ALIASES: Final = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "data_parallel": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "sc": "speculative_config",
    "nnodes": "nnodes",
}

LARGEST: Final = 2**62

DEFAULT_BATCHED: Final = 2048
"""max_num_batched_tokens of a configuration made without a model (vllm/config/scheduler.py, all versions)."""

_FAMILIES: Final = {
    "flash_attn_mla": "fa_mla",
    "flash_attn": "flash_attn",
    "flash_attention": "flash_attn",
    "flashattention_mla": "fa_mla",
    "triton_attn": "triton",
    "triton_mla": "triton",
    "triton/fla": "triton",
    "flex_attention": "flex",
    "torch_sdpa": "torch_native",
    "rocm_aiter_fa": "aiter",
    "rocm_attn": "rocm",
    "rocm_flash": "rocm",
    "rocmflashattention": "rocm",
    "cpu_attn": "cpu",
}
"""Backend names that are not their family's name already (lower case)."""


def normal_backend(name: str) -> str:
    """A backend's family name in lower case: `FLASH_ATTN` is flash_attn (which version: another line), `Triton/FLA` triton."""
    low = name.strip().lower().replace(" ", "_")
    if low in _FAMILIES:
        return _FAMILIES[low]
    return re.sub(r"_(?:attn|attention)$", "", low)


def as_int(value: Any) -> int | None:
    """A whole number that a size, a count or a length can be; a log may hold any text."""
    found = arguments.as_int(value)
    return found if found is not None and abs(found) < LARGEST else None


def as_float(value: Any) -> float | None:
    """A finite number; a log may hold any text."""
    found = arguments.as_float(value)
    return found if found is not None and math.isfinite(found) and abs(found) < LARGEST else None


class ConfigFacts:
    """What one start printed about its configuration. `take` is fed events; `names` gives the contract's names."""

    def __init__(self) -> None:
        self.args: dict[str, Any] = {}
        self.engine: dict[str, Any] = {}
        self.command: dict[str, Any] = {}
        self.lines: dict[str, Any] = {}
        self.backends: dict[str, str] = {}
        self.draft = False
        self._batched: list[int] = []
        self._checkpoints: list[int] = []

    def take(self, event: Event) -> None:
        """One configuration event."""
        handler = getattr(self, f"_{event.id}", None)
        if handler is not None:
            handler(event)

    # -- dumps

    def _non_default_args(self, event: Event) -> None:
        found = parse_literal(event.word("args") or "")
        if isinstance(found, dict):
            self.args.update(found)

    def _all_args(self, event: Event) -> None:
        self.args.update(parse_call(event.word("args") or ""))

    def _engine_config(self, event: Event) -> None:
        self.engine = {**parse_pairs(event.word("config") or ""), **self.engine}

    def _crash_dump(self, event: Event) -> None:
        if (text := event.word("config")) is not None:
            self.engine = {**parse_pairs(text), **self.engine}

    def _command_line(self, event: Event) -> None:
        # A flattened paste glues a flag to the number before it.
        text = re.sub(r"(?<=\d)--(?=[a-z])", " --", event.word("command") or "").split("```")[0]
        flags = {_ALIASES.get(k, k): v for k, v in parse_command_line(text).items()}
        first = text.split(maxsplit=1)
        if first and not first[0].startswith("-") and "model" not in flags:
            flags["model"] = first[0].strip("'\"\\")
        self.command = {k: v for k, v in flags.items() if v not in {"", "\\"}}

    # -- single lines

    def _max_model_len(self, event: Event) -> None:
        # A draft model's line follows the target's.
        self.lines.setdefault("length", event.count("length"))

    def _chunked_prefill(self, event: Event) -> None:
        if (tokens := event.count("tokens")) is not None:
            self._batched.append(tokens)
            del self._batched[64:]

    def _step_alignment(self, event: Event) -> None:
        self.lines["batched_checked"] = event.count("tokens")
        self.lines["block_checked"] = event.count("block")

    def _scheduler_defaults(self, event: Event) -> None:
        if (tokens := event.count("tokens") or event.count("raised")) is not None:
            self.lines["batched_default"] = tokens
        if (seqs := event.count("seqs")) is not None:
            self.lines["seqs_default"] = seqs

    def _auto_fit(self, event: Event) -> None:
        found = event.count("to") or event.count("derived") or event.count("full")
        if found is not None:
            self.lines["fitted"] = found

    def _kv_dtype(self, event: Event) -> None:
        if (dtype := event.word("dtype")) is not None:
            self.lines["kv_dtype"] = dtype
        elif (form := event.word("format")) is not None:
            self.lines["kv_format"] = form

    def _kv_layout(self, event: Event) -> None:
        self.lines["kv_layout"] = event.word("layout") or event.word("forced")

    def _state_mode(self, event: Event) -> None:
        mode = event.word("mode") or event.word("fallback") or event.word("current")
        if mode is not None:
            self.lines["state_mode"] = mode

    def _state_dtype(self, event: Event) -> None:
        self.lines["state_dtype"] = event.word("dtype") or event.word("user") or event.word("reset")

    def _graphs_off(self, _: Event) -> None:
        self.lines["graphs_off"] = True

    def _graph_mode(self, event: Event) -> None:
        if (mode := event.word("mode") or event.word("to") or event.word("instead")) is not None:
            self.lines["graph_mode"] = mode

    def _graphs_in_budget(self, event: Event) -> None:
        if (fraction := event.number("utilization") or event.number("current")) is not None:
            self.lines["utilization_4"] = fraction

    def _drafter(self, _: Event) -> None:
        self.draft = True

    def _checkpoint_size(self, event: Event) -> None:
        # One line per model, repeated by workers: the second size is the draft's.
        size, ram = event.amount("size"), event.amount("ram")
        if ram is not None:
            self.lines["ram"] = min(ram.bytes, self.lines.get("ram", ram.bytes))
        if size is not None and size.bytes not in self._checkpoints and len(self._checkpoints) < 2:
            self._checkpoints.append(size.bytes)

    def _hybrid_manager_off(self, _: Event) -> None:
        self.lines["window_as_full"] = True

    def _warmup_failed(self, _: Event) -> None:
        self.lines["warmup_failed"] = True

    # -- backends

    def _backend(self, name: str, raw: str) -> None:
        self.backends.setdefault(name, raw)

    def _attention_backend(self, event: Event) -> None:
        if (vision := event.word("vision") or event.word("vit")) is not None:
            self._backend("vision_backend", vision)
            return
        found = next((v for n in ("auto", "user", "forced", "selected", "old") if (v := event.word(n))), None)
        if found is None or found.lower().startswith("backend"):
            return
        if "attention" in self.backends and self.draft:
            self._backend("attention_backend_draft", found)
        self._backend("attention", found)

    def _flash_attention_version(self, event: Event) -> None:
        self.lines.setdefault("flash_attention", event.count("version"))

    def _phase_backend(self, event: Event) -> None:
        for field, name in (
            ("mla", "mla_backend_prefill"),
            ("mla_old", "mla_backend_prefill"),
            ("gdn", "linear_attention_backend_prefill"),
            ("gdn_verify", "linear_attention_backend_verify"),
            ("kda", "linear_attention_backend_prefill"),
            ("ssu", "state_backend"),
            ("replay", "replay"),
        ):
            if (found := event.word(field)) is not None:
                self._backend(name, found)
        if (phase := event.word("trtllm")) is not None:
            for one in ("prefill", "decode") if not phase.strip() else (phase.strip(),):
                self._backend(f"trtllm_{one}", "TRTLLM")

    def _moe_backend(self, event: Event) -> None:
        self._backend("moe_backend", event.word("backend") or "")

    def _allreduce_backend(self, event: Event) -> None:
        found = event.word("fusion") or event.word("auto")
        if found is not None:
            self._backend("allreduce_fusion", found)

    def _block_size(self, event: Event) -> None:
        names = (event.word("backend") or "").split("/")
        window = next((n for n in names if "SWA" in n), None)
        if window is not None:
            self._backend("sliding_window_backend", window)

    def _sampling_backend(self, event: Event) -> None:
        self._backend("sampling_backend", "flashinfer" if event.word("flashinfer") else "pytorch")

    # -- results

    def asked(self, *names: str) -> Any:
        """The first of `names` in the arguments, else in an echoed command line."""
        for table in (self.args, self.command):
            for name in names:
                if table.get(name) is not None:
                    return table[name]
        return None

    @property
    def model(self) -> str | None:
        """The model's name or path."""
        for table in (self.engine, self.args, self.command):
            if (found := as_text(table.get("model")) or as_text(table.get("model_tag"))) is not None:
                return found
        return as_text(self.lines.get("model"))

    @property
    def speculative(self) -> dict[str, Any]:
        """The speculative configuration as a dict (keys differ by version); empty where none was printed."""
        for value in (self.engine.get("speculative_config"), self.asked("speculative_config")):
            if isinstance(value, dict):
                return value
            if isinstance(value, str) and value.startswith("{") and isinstance(found := parse_literal(value), dict):
                return found
        old = as_int(self.asked("num_speculative_tokens"))
        return {"num_speculative_tokens": old, "model": self.asked("speculative_model")} if old is not None else {}

    @property
    def graphs_off(self) -> bool:
        """Whether a line or a flag says that no CUDA graphs are captured."""
        return bool(
            self.lines.get("graphs_off")
            or as_flag(self.engine.get("enforce_eager"))
            or as_flag(self.asked("enforce_eager"))
        )

    def size(self, name: str) -> int | None:
        """A parallel size: the user's, else the engine's, else what a line about the workers' world says."""
        for value in (self.args.get(name), self.engine.get(name), self.command.get(name), self.lines.get(name)):
            if (found := as_int(value)) is not None and found > 0:
                return found
        return None

    @property
    def any(self) -> bool:
        """Whether anything was printed."""
        return bool(self.args or self.engine or self.lines or self.backends or self._batched)

    def context_length(self) -> int | None:
        """The longest request: after auto-fit, as the engine resolved it, as asked for, as the front end printed it."""
        asked = as_int(self.asked("max_model_len"))
        for found in (
            self.lines.get("fitted"),
            as_int(self.engine.get("max_seq_len")),
            asked if asked is not None and asked > 0 else None,
            self.lines.get("length"),
        ):
            if isinstance(found, int):
                return found
        return None

    def names(self, fraction: float | None) -> dict[str, Any]:
        """The contract's names; None where nothing was printed.

        Args:
            fraction: the utilisation of a budget line, used where no argument gives it.
        """
        speculative = self.speculative
        asked = self.asked
        asked_fraction = as_float(asked("gpu_memory_utilization"))
        if asked_fraction is None:
            asked_fraction = self.lines.get("utilization_4") if fraction is None else fraction
        batched = as_int(asked("max_num_batched_tokens"))
        caching = as_flag(self.engine.get("enable_prefix_caching"))
        tp, dp = self.size("tensor_parallel_size"), self.size("data_parallel_size")
        expert = as_flag(asked("enable_expert_parallel"))
        dtype = as_text(self.engine.get("dtype")) or as_text(asked("dtype"))
        found: dict[str, Any] = {
            "tp_size": tp,
            "pp_size": self.size("pipeline_parallel_size"),
            "dp_size": dp,
            "ep_size": (tp or 1) * (dp or 1) if expert and tp is not None else None,
            "nnodes": as_int(asked("nnodes")),
            "dcp_size": self.size("decode_context_parallel_size"),
            "pcp_size": self.size("prefill_context_parallel_size"),
            "memory_fraction": asked_fraction,
            "max_running_requests": as_int(asked("max_num_seqs")),
            "context_length": self.context_length(),
            "max_total_tokens": None,
            "kv_cache_dtype": as_text(self.engine.get("kv_cache_dtype"))
            or self.lines.get("kv_dtype")
            or as_text(asked("kv_cache_dtype")),
            "kv_cache_dtype_requested": as_text(asked("kv_cache_dtype")),
            "page_size": as_int(asked("block_size")),
            "chunked_prefill_tokens": batched if batched is not None else self._printed_batched(),
            "max_prefill_tokens": None,
            "prefix_caching": caching if caching is not None else self._asked_caching(),
            "state_dtype": self.lines.get("state_dtype") or _not_auto(asked("mamba_ssm_cache_dtype")),
            "speculative_algorithm": as_text(speculative.get("method")),
            "speculative_model": as_text(speculative.get("model")) or as_text(speculative.get("draft_model")),
            "speculative_draft_tokens": as_int(
                speculative.get("num_spec_tokens", speculative.get("num_speculative_tokens"))
            ),
            "quantization": as_text(self.engine.get("quantization")) or as_text(asked("quantization")),
            "dtype": dtype,
            "state_cache_mode": self.lines.get("state_mode") or as_text(asked("mamba_cache_mode")),
            "kv_layout": self.lines.get("kv_layout"),
            "kv_cache_format": self.lines.get("kv_format"),
            "kv_cache_memory_bytes": as_int(asked("kv_cache_memory_bytes", "kv_cache_memory")),
            "num_gpu_blocks_override": as_int(asked("num_gpu_blocks_override")),
            "cpu_offload_gib": as_float(asked("cpu_offload_gb")),
            "swap_space_gib": as_float(asked("swap_space")),
            "kv_offloading_gib": as_float(asked("kv_offloading_size")),
            "enforce_eager": _first_flag(self.engine.get("enforce_eager"), asked("enforce_eager")),
            "enable_lora": as_flag(asked("enable_lora")),
            "max_loras": as_int(asked("max_loras")),
            "max_lora_rank": as_int(asked("max_lora_rank")),
            "sleep_mode": as_flag(asked("enable_sleep_mode")),
            "load_format": as_text(self.engine.get("load_format")),
            "checkpoint_bytes": self._checkpoints[0] if self._checkpoints else None,
            "draft_checkpoint_bytes": self._checkpoints[1] if len(self._checkpoints) > 1 and self.draft else None,
            "host_available_bytes": self.lines.get("ram"),
            **self._graph_names(),
            **self._backend_names(),
        }
        return found

    def _printed_batched(self) -> int | None:
        """Tokens per step from the lines that name it.

        A default configuration made beside the real one prints its 2048 too, before or after the real line: where the
        lines differ, the engine's compile ranges (which end at the real figure) decide, else the one that is not 2048.
        """
        values = set(self._batched)
        if len(values) > 1:
            ends = self._compile_end()
            if ends in values:
                return ends
            values.discard(DEFAULT_BATCHED)
        if len(values) == 1:
            return values.pop()
        if self.lines.get("batched_checked") is not None:
            return int(self.lines["batched_checked"])
        return self._batched[-1] if self._batched else self.lines.get("batched_default")

    def _compile_end(self) -> int | None:
        compilation = self.engine.get("compilation_config")
        if not isinstance(compilation, dict):
            return None
        for name in ("compile_ranges_endpoints", "compile_ranges_split_points"):
            points = compilation.get(name)
            if isinstance(points, list) and points:
                return as_int(points[-1])
        return None

    def _asked_caching(self) -> bool | None:
        if (found := as_flag(self.asked("enable_prefix_caching"))) is not None:
            return found
        return False if self.command.get("no_enable_prefix_caching") is True else None

    def _graph_names(self) -> dict[str, Any]:
        changed = self.lines.get("graph_mode")
        compilation = self.engine.get("compilation_config")
        if not isinstance(compilation, dict):
            return {"cudagraph_mode": changed}
        mode = compilation.get("cudagraph_mode")
        largest = as_int(compilation.get("max_cudagraph_capture_size", compilation.get("max_capture_size")))
        sizes = compilation.get("cudagraph_capture_sizes")
        if largest is None and isinstance(sizes, list) and all(isinstance(s, int) for s in sizes) and sizes:
            largest = max(sizes)
        word = re.search(r"CUDAGraphMode\.(\w+)", mode) if isinstance(mode, str) else None
        return {"cudagraph_mode": changed or (word.group(1) if word else None), "cudagraph_max_size": largest}

    def _backend_names(self) -> dict[str, Any]:
        raw = self.backends
        out: dict[str, Any] = {}
        name = raw.get("attention") or as_text(self.asked("attention_backend"))
        if name is not None:
            for phase in ("prefill", "decode"):
                key = self._attention_key(name, phase)
                out.setdefault(key, self._attention_value(name, phase))
        for key, value in raw.items():
            if key == "attention" or key.startswith("trtllm_") or key == "replay":
                continue
            out[key] = self._plain_value(value) if key != "moe_backend" else value.replace("'", "").lower()
        if "replay" in raw:
            out["state_checkpoint"] = "replay"
            if "state_backend" in out:
                out["state_backend"] += "+replay"
        if self.speculative and "attention_backend_decode" in out:
            # A draft's tokens are verified by the decode kernels.
            out["attention_backend_verify"] = out["attention_backend_decode"]
        out["backends_as_printed"] = dict(raw) or None
        return {k: v for k, v in out.items() if v is not None}

    def _attention_key(self, name: str, phase: str) -> str:
        upper = name.upper().replace(" ", "_")
        if "SPARSE" in upper and ("MLA" in upper or "NSA" in upper or "DSA" in upper):
            return f"sparse_mla_backend_{phase}"
        if "MLA" in upper:
            # The attention line of an MLA model names its decode; prefill has a line of its own.
            return "mla_backend_decode"
        return f"attention_backend_{phase}"

    def _attention_value(self, name: str, phase: str) -> str:
        value = self._plain_value(name)
        if value == "flashinfer" and f"trtllm_{phase}" in self.backends:
            return "flashinfer+trtllm"
        return value

    def _plain_value(self, name: str) -> str:
        value = normal_backend(name)
        version = self.lines.get("flash_attention")
        return f"fa{version}" if value == "flash_attn" and version is not None else value


def _first_flag(*values: Any) -> bool | None:
    return next((flag for v in values if (flag := as_flag(v)) is not None), None)


def _not_auto(value: Any) -> str | None:
    text = as_text(value)
    return None if text == "auto" else text
