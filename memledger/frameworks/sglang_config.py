"""What an SGLang server was asked for: the argument dump, command lines and notices, under the contract's names.

`server_args` is a request and a dispatcher line the result (SGLang, layers/attention/linear/*_backend.py): a later,
more exact line replaces the dump's value. Engine defaults are never filled in; what no line prints stays absent.
"""

from __future__ import annotations

import re
from typing import Any, Final

from memledger.events import Event
from memledger.frameworks.arguments import (
    as_flag,
    as_float,
    as_int,
    as_text,
    parse_call,
    parse_command_line,
    parse_literal,
)

_INTS: Final = {
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "dp_size": "dp_size",
    "ep_size": "ep_size",
    "dcp_size": "dcp_size",
    "attn_cp_size": "attn_cp_size",
    "moe_dense_tp_size": "moe_dense_tp_size",
    "nnodes": "nnodes",
    "max_running_requests": "max_running_requests",
    "context_length": "context_length",
    "max_total_tokens": "max_total_tokens",
    "page_size": "page_size",
    "chunked_prefill_size": "chunked_prefill_tokens",
    "max_prefill_tokens": "max_prefill_tokens",
    "speculative_num_draft_tokens": "speculative_draft_tokens",
    "speculative_num_steps": "speculative_steps",
    "speculative_eagle_topk": "speculative_topk",
    "max_mamba_cache_size": "state_slots_requested",
    "mamba_track_interval": "state_track_interval",
    "linear_replayssm_cache_len": "state_replay_length",
    "hicache_size": "host_cache_gb",
    "max_loras_per_batch": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "cuda_graph_max_bs": "graph_max_batch",
}
_FLOATS: Final = {
    "mem_fraction_static": "memory_fraction",
    "mamba_full_memory_ratio": "state_memory_ratio",
    "swa_full_tokens_ratio": "swa_full_tokens_ratio",
    "hicache_ratio": "host_cache_ratio",
    "cpu_offload_gb": "cpu_offload_gb",
}
_TEXTS: Final = {
    "kv_cache_dtype": "kv_cache_dtype_requested",
    "mamba_ssm_dtype": "state_dtype",
    "speculative_algorithm": "speculative_algorithm",
    "speculative_draft_model_path": "speculative_draft_model",
    "quantization": "quantization",
    "dtype": "dtype",
    "device": "device",
    "disaggregation_mode": "disaggregation_mode",
    "mm_attention_backend": "vision_backend",
    "sampling_backend": "sampling_backend",
    "moe_a2a_backend": "moe_communication_backend",
}
_FLAGS: Final = {
    "enable_dp_attention": "dp_attention",
    "enable_dp_lm_head": "dp_lm_head",
    "enable_hierarchical_cache": "host_cache",
    "enable_lora": "lora",
    "enable_memory_saver": "memory_saver",
    "enable_unified_memory": "unified_pool",
    "disable_cuda_graph": "graphs_disabled",
    "disable_overlap_schedule": "overlap_disabled",
    "enable_int8_mamba_checkpoint": "state_checkpoint",
    "enable_linear_replayssm": "state_replay",
    "enable_linear_replayssm_spec": "state_replay_speculative",
    "enable_gdn_replayssm_spec": "state_replay_speculative",
    "enable_deterministic_inference": "deterministic",
}
_NEEDS: Final = {"host_cache": ("host_cache_gb", "host_cache_ratio"), "lora": ("max_loras", "max_lora_rank")}
"""Names that mean something only with their switch on; their defaults stand in every dump."""
_ALIASES: Final = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "model": "model_path",
    "speculative_algo": "speculative_algorithm",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
}
_KERNEL_SUFFIX: Final = re.compile(r"(?:Prefill)?(?:GDN|KDA)?(?:Prefill)?Kernel$")
_BACKEND_ALIASES: Final = {"tokenspeed_mla": "cutedsl_mla", "nsa": "dsa", "compressed": "dsv4"}

HYBRID_ONLY: Final = frozenset(
    {
        "state_dtype",
        "state_backend",
        "state_slots_requested",
        "state_memory_ratio",
        "state_track_interval",
        "state_replay_length",
        "state_checkpoint",
        "state_replay",
        "state_replay_speculative",
    }
)
"""Names whose fields stand in every dump, hybrid model or not: kept only where the log shows recurrent state."""


def backend_name(text: str | None) -> str | None:
    """A backend's common name: lower-case family name without a kernel class's suffix."""
    if text is None:
        return None
    short = _KERNEL_SUFFIX.sub("", text).lower()
    return _BACKEND_ALIASES.get(short, short)


class ConfigBuilder:
    """Collects one start's configuration; `values()` gives the contract's names."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.dumped = False
        self.text: str | None = None
        self.model: str | None = None
        self.version: str | None = None
        self.adjusted_fraction: float | None = None
        self.hybrid = False
        self.mla = False
        self._command: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self._fallback: dict[str, Any] = {}

    # ------------------------------------------------------------------ what lines say

    def dump(self, text: str) -> None:
        """The argument dump in any of its three forms."""
        parsed = parse_literal(text) if text.startswith("{") else parse_call(text)
        self.text = text
        self.dumped = True
        if isinstance(parsed, dict):
            self.arguments = parsed

    def command(self, flags: str) -> None:
        """An echoed command line; the dump's values win over it."""
        parsed = parse_command_line(flags)
        named = {_ALIASES.get(name, name): value for name, value in parsed.items()}
        if "model_path" in named or len(named) > 1:
            self._command = named

    def set(self, name: str, value: Any) -> None:
        """A result line's value: replaces what was asked for."""
        if value is not None:
            self._found[name] = value

    def first(self, name: str, value: Any) -> None:
        """A result line's value where none is known yet: a draft's line does not replace the target's."""
        if value is not None:
            self._found.setdefault(name, value)

    def seen(self, name: str) -> bool:
        """Whether a result line said it already."""
        return name in self._found

    def fallback(self, name: str, value: Any) -> None:
        """A value for where neither a result line nor the arguments say it."""
        if value is not None:
            self._fallback.setdefault(name, value)

    def argument(self, name: str) -> Any:
        """One argument as dumped, else as given on the command line; None where neither has it."""
        if name in self.arguments:
            return self.arguments[name]
        return self._command.get(name)

    def known(self, name: str) -> bool:
        """Whether the dump holds that argument (also with the value None)."""
        return name in self.arguments

    @property
    def speculative(self) -> bool | None:
        """Whether speculative decoding is on; None where nothing says."""
        if as_text(self.argument("speculative_algorithm")):
            return True
        given = self.known("speculative_algorithm") or (self._command and not self.dumped)
        return False if given else None

    def take(self, event: Event) -> bool:
        """Take a configuration line; whether it was one."""
        handler = _HANDLERS.get(event.id)
        if handler is None:
            return False
        handler(self, event)
        return True

    # ------------------------------------------------------------------ the result

    def values(self) -> dict[str, Any]:
        """Everything known, contract names first as they come; absent where no line says it."""
        values: dict[str, Any] = {}
        for table, convert in ((_INTS, as_int), (_FLOATS, as_float), (_TEXTS, as_text), (_FLAGS, as_flag)):
            for source, name in table.items():
                if (value := convert(self.argument(source))) is not None:
                    values[name] = value
        if values.get("disaggregation_mode") == "null":
            del values["disaggregation_mode"]
        for switch, names in _NEEDS.items():
            if not values.get(switch):
                for name in names:
                    values.pop(name, None)
        if (disabled := as_flag(self.argument("disable_radix_cache"))) is not None:
            values["prefix_caching"] = not disabled
        elif self._command and not self.dumped and "disable_radix_cache" in self._command:
            values["prefix_caching"] = False
        self._graphs(values)
        self._attention(values)
        if self.hybrid:
            self._state(values)
        for name, value in self._fallback.items():
            if name != "attention_backend":
                values.setdefault(name, value)
        values.update(self._found)
        if not self.hybrid:
            values = {k: v for k, v in values.items() if k not in HYBRID_ONLY}
        return values

    def _graphs(self, values: dict[str, Any]) -> None:
        """0.5.14 nests the graph settings: `cuda_graph_config` with `decode` and `prefill` parts."""
        nested = self.argument("cuda_graph_config")
        if isinstance(nested, dict):
            for phase in ("decode", "prefill"):
                part = nested.get(phase)
                if isinstance(part, dict):
                    if (backend := as_text(part.get("backend"))) is not None:
                        values[f"graph_backend_{phase}"] = backend
                    if (largest := as_int(part.get("max_bs"))) is not None:
                        values["graph_max_batch" if phase == "decode" else "graph_max_prefill_tokens"] = largest

    def _attention(self, values: dict[str, Any]) -> None:
        chosen = self._fallback.get("attention_backend")
        common = as_text(self.argument("attention_backend")) or chosen
        for phase in ("prefill", "decode"):
            name = as_text(self.argument(f"{phase}_attention_backend")) or common
            if name is not None:
                values[f"attention_backend_{phase}"] = backend_name(name)
            if self.mla and name is not None:
                values[f"mla_backend_{phase}"] = backend_name(name)
            for old in ("nsa", "dsa") if common in {"nsa", "dsa"} else ():
                if sparse := as_text(self.argument(f"{old}_{phase}_backend")):
                    values[f"sparse_mla_backend_{phase}"] = backend_name(sparse)
        if draft := as_text(self.argument("speculative_draft_attention_backend")):
            values["attention_backend_draft"] = backend_name(draft)
        if self.speculative and (mode := as_text(self.argument("speculative_attention_mode"))):
            verify = self._found.get(f"attention_backend_{mode}", values.get(f"attention_backend_{mode}"))
            if verify is not None:
                values["attention_backend_verify"] = verify
        if (moe := as_text(self.argument("moe_runner_backend"))) and moe != "auto":
            values["moe_backend"] = moe
        if (page_major := as_flag(self.argument("enable_page_major_kv_layout"))) is not None:
            values["kv_layout"] = "page_major" if page_major else "layer_major"
        if (fusion := as_flag(self.argument("enable_flashinfer_allreduce_fusion"))) is not None:
            values["allreduce_fusion"] = fusion

    def _state(self, values: dict[str, Any]) -> None:
        base = as_text(self.argument("linear_attn_backend"))
        for phase in ("prefill", "decode", "verify"):
            name = as_text(self.argument(f"linear_attn_{phase}_backend")) or (base if phase != "verify" else None)
            if name is not None and "state_backend" not in self._found:
                values[f"linear_attention_backend_{phase}"] = backend_name(name)
        strategy = as_text(self.argument("mamba_radix_cache_strategy")) or as_text(
            self.argument("mamba_scheduler_strategy")
        )
        if values.get("prefix_caching") is False:
            values["state_cache_mode"] = "none"
        elif strategy is not None:
            values["state_cache_mode"] = strategy
        if not any(name.startswith("linear_attention_backend") for name in self._found) and (
            ssu := as_text(self.argument("mamba_backend"))
        ):
            values["state_backend"] = backend_name(ssu)


# --------------------------------------------------------------------------------------------------------------------
# One small function per configuration line.


def _server_args(config: ConfigBuilder, event: Event) -> None:
    config.dump(event.word("args") or "")


def _command(config: ConfigBuilder, event: Event) -> None:
    config.command(event.word("flags") or "")


def _version(config: ConfigBuilder, event: Event) -> None:
    config.version = event.word("version") or config.version


def _attention_default(config: ConfigBuilder, event: Event) -> None:
    config.fallback("attention_backend", event.word("backend"))


def _attention_hybrid(config: ConfigBuilder, event: Event) -> None:
    for phase in ("prefill", "decode"):
        name = backend_name(event.word(phase))
        config.set(f"attention_backend_{phase}", name)
        if config.mla:
            config.set(f"mla_backend_{phase}", name)


def _attention_draft(config: ConfigBuilder, event: Event) -> None:
    config.set("attention_backend_draft", backend_name(event.word("backend")))


def _dsv4(config: ConfigBuilder, event: Event) -> None:
    for phase in ("prefill", "decode"):
        config.set(f"attention_backend_{phase}", "dsv4")


def _sparse(config: ConfigBuilder, event: Event) -> None:
    both = event.word("both")
    config.set("sparse_mla_backend_prefill", event.word("prefill") or event.word("prefill2") or both)
    config.set("sparse_mla_backend_decode", event.word("decode") or event.word("decode2") or both)


def _linear(config: ConfigBuilder, event: Event) -> None:
    for phase in ("prefill", "decode", "verify"):
        name = backend_name(event.word(phase))
        config.first(f"linear_attention_backend_{phase}", name)
        config.first(f"linear_attention_backend_{phase}_requested", name)


def _dispatcher(config: ConfigBuilder, event: Event) -> None:
    """The kernels really used, of the target (a draft prints the line again); what the flags resolved to stays `_requested`."""
    if config.seen("linear_attention_kind"):
        return
    for phase, field in (("prefill", "extend"), ("decode", "decode"), ("verify", "verify")):
        config.set(f"linear_attention_backend_{phase}", backend_name(event.word(field)))
    config.set("linear_attention_kind", (event.word("kind") or "").lower() or None)
    config.hybrid = True


def _linear_default(config: ConfigBuilder, event: Event) -> None:
    for phase in ("decode", "prefill"):
        if name := event.word(phase):
            config.set(f"linear_attention_backend_{phase}", backend_name(name))
    if phase_back := event.word("fallback"):
        config.set(f"linear_attention_backend_{phase_back}", "triton")


def _marker(config: ConfigBuilder, event: Event) -> None:
    config.hybrid = True
    if event.word("arch"):
        config.set("prefix_caching", False)


def _ssu(config: ConfigBuilder, event: Event) -> None:
    config.set("state_backend", backend_name(event.word("backend")))


def _vision(config: ConfigBuilder, event: Event) -> None:
    config.set("vision_backend", event.word("backend") or event.word("chosen"))


def _tree(config: ConfigBuilder, event: Event) -> None:
    config.set("prefix_cache", event.word("impl"))
    if event.word("impl") == "ChunkCache":
        config.set("prefix_caching", False)
    if event.flag("ssm"):
        config.hybrid = True


def _page(config: ConfigBuilder, event: Event) -> None:
    config.fallback("page_size", event.count("tokens"))


def _chunk(config: ConfigBuilder, event: Event) -> None:
    config.fallback("chunked_prefill_tokens", event.count("tokens"))


def _requests(config: ConfigBuilder, event: Event) -> None:
    config.fallback("max_running_requests", event.count("requests"))


def _fraction(config: ConfigBuilder, event: Event) -> None:
    config.adjusted_fraction = event.number("fraction")
    config.fallback("memory_fraction", event.number("before") or event.number("fraction"))


def _dtype(config: ConfigBuilder, event: Event) -> None:
    config.fallback("kv_cache_dtype", event.word("dtype"))


def _dtype_set(config: ConfigBuilder, event: Event) -> None:
    config.fallback("kv_cache_dtype_requested", event.word("dtype"))


def _overlap_off(config: ConfigBuilder, event: Event) -> None:
    config.fallback("state_cache_mode", "no_buffer")
    config.hybrid = True


def _extra_buffer(config: ConfigBuilder, event: Event) -> None:
    config.set("state_cache_mode", "no_buffer" if event.word("what") == "disabled" else "extra_buffer")
    config.hybrid = True


def _ssm_dtype(config: ConfigBuilder, event: Event) -> None:
    config.set("state_dtype", event.word("dtype") or event.word("default"))


def _no_prefix_cache(config: ConfigBuilder, event: Event) -> None:
    config.set("prefix_caching", False)


def _simple(name: str, field: str = "backend") -> Any:
    def take(config: ConfigBuilder, event: Event) -> None:
        config.set(name, event.word(field))

    return take


def _fusion(config: ConfigBuilder, event: Event) -> None:
    config.set("allreduce_fusion", True)


def _graph_sizes(config: ConfigBuilder, event: Event) -> None:
    sizes = [int(n) for n in re.findall(r"\d+", event.word("sizes") or "")]
    if sizes and event.word("what") == "bs":
        config.fallback("graph_max_batch", max(sizes))


def _mm_reserve(config: ConfigBuilder, event: Event) -> None:
    if (size := event.amount("size")) is not None:
        config.set("multimodal_reserve_bytes", size.bytes)


_HANDLERS: Final[dict[str, Any]] = {
    "server_args": _server_args,
    "launch_command": _command,
    "version_banner": _version,
    "version_package": _version,
    "attention_default": _attention_default,
    "attention_model_rule": _attention_default,
    "attention_hybrid": _attention_hybrid,
    "attention_draft": _attention_draft,
    "attention_dsv4": _dsv4,
    "sparse_mla": _sparse,
    "linear_attention": _linear,
    "linear_dispatcher": _dispatcher,
    "linear_default": _linear_default,
    "linear_marker": _marker,
    "ssu_backend": _ssu,
    "vision_backend": _vision,
    "tree_cache": _tree,
    "page_size_changed": _page,
    "chunk_adjusted": _chunk,
    "max_running_reset": _requests,
    "max_running_set": _requests,
    "fraction_adjusted": _fraction,
    "kv_dtype": _dtype,
    "kv_dtype_set": _dtype_set,
    "overlap_off": _overlap_off,
    "extra_buffer_off": _extra_buffer,
    "ssm_dtype_set": _ssm_dtype,
    "radix_off": _no_prefix_cache,
    "chunk_cache": _no_prefix_cache,
    "moe_backend": _simple("moe_backend"),
    "sampling_backend": _simple("sampling_backend"),
    "allreduce_fusion": _fusion,
    "graph_bs": _graph_sizes,
    "mm_reserve": _mm_reserve,
}

BEFORE_THE_DUMP: Final = frozenset(
    {
        "launch_command",
        "version_banner",
        "version_package",
        "gpu_total",
        "max_running_reset",
        "max_running_set",
        "chunk_adjusted",
        "fraction_adjusted",
        "kv_dtype_set",
        "page_size_changed",
        "attention_default",
        "attention_model_rule",
        "sparse_mla",
        "linear_default",
        "overlap_off",
        "radix_off",
        "chunk_cache",
        "extra_buffer_off",
        "ssm_dtype_set",
        "swa_disabled",
        "graph_off",
        "graph_bs_expanded",
        "moe_backend",
        "sampling_backend",
        "fraction_multimodal_old",
    }
)
"""Lines that the main process prints before the dump: after a start has begun they may belong to the next one."""
