"""The names of steps, settings and figures as people read them."""

from __future__ import annotations

from typing import Final

STEP_LABELS: Final = {
    "device_total": "device total",
    "in_use_at_start": "in use before",
    "free_before_loading": "free before load",
    "budget_rule": "budget rule",
    "weights": "weights",
    "draft": "draft model",
    "activations": "activations",
    "cuda_graphs": "CUDA graphs",
    "recurrent_state": "recurrent state",
    "window_pool": "window layers",
    "other": "other entries",
    "left_in_budget": "left in budget",
    "kv_bytes_per_token": "bytes per token",
    "rounding_and_groups": "what is counted",
    "not_in_the_logs": "not in the logs",
    "unexplained": "unexplained",
}
STEP_CAUSES: Final = {
    "device_total": "the device's size",
    "in_use_at_start": "memory in use before the start",
    "free_before_loading": "memory free before loading (the card, less what was in use)",
    "budget_rule": "the budget (memory fraction and what it is a share of)",
    "weights": "the weights",
    "draft": "the draft model",
    "activations": "the room reserved for activations",
    "cuda_graphs": "the CUDA graph estimate in the budget",
    "recurrent_state": "reserved recurrent state",
    "window_pool": "the pool of the sliding-window layers",
    "other": "other entries",
    "left_in_budget": "budget that did not become pool",
    "kv_bytes_per_token": "KV bytes per token",
    "rounding_and_groups": "what the printed figure counts",
    "not_in_the_logs": "what the logs do not print",
    "unexplained": "what nothing explains",
}
SETTING_LABELS: Final = {
    "tp_size": "tensor parallel",
    "pp_size": "pipeline parallel",
    "dp_size": "data parallel",
    "ep_size": "expert parallel",
    "context_length": "context length",
    "max_running_requests": "max running requests",
    "memory_fraction": "memory fraction",
    "kv_cache_dtype": "KV dtype",
    "state_dtype": "state dtype",
    "state_cache_mode": "state cache mode",
    "speculative_algorithm": "speculative",
    "speculative_tokens_verified": "tokens verified a step",
    "prefix_caching": "prefix caching",
    "chunked_prefill_tokens": "tokens per prefill step",
    "attention_backend_prefill": "attention, prefill",
    "attention_backend_decode": "attention, decode",
    "mla_backend_prefill": "latent attention, prefill",
    "mla_backend_decode": "latent attention, decode",
    "linear_attention_backend_prefill": "linear attention, prefill",
    "linear_attention_backend_decode": "linear attention, decode",
    "state_backend": "Mamba state",
    "block_tokens": "block size",
    "swa_full_tokens_ratio": "window tokens ratio",
    "state_slots": "state slots",
    "max_total_tokens": "max total tokens",
    "enforce_eager": "eager (no graphs)",
}
FIGURE_LABELS: Final = {
    "kv_tokens": "KV tokens, printed",
    "token_rule": "what they count",
    "effective_tokens": "tokens, one measure",
    "pool_bytes": "KV pool",
    "kv_bytes_per_token": "bytes per token",
    "state_bytes_held": "state reserved",
    "state_bytes_per_request": "state per request",
    "requests_that_fit": "requests that fit",
    "device_total_bytes": "device total",
    "budget_bytes": "budget",
    "weights_bytes": "weights",
    "draft_bytes": "draft model",
    "activations_bytes": "activations",
    "window_pool_bytes": "window layers",
    "cuda_graphs_held_bytes": "CUDA graphs",
}


def setting(name: str) -> str:
    """A setting's label."""
    return SETTING_LABELS.get(name, name.replace("_", " "))


def figure(name: str) -> str:
    """A figure's label."""
    return FIGURE_LABELS.get(name, name.replace("_", " "))
