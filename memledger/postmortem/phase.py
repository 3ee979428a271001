"""When a failure happened: from the frames of its traceback, from what the line itself names, and from where its server stood."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from memledger.ledger import Server
from memledger.postmortem.incident import Phase
from memledger.postmortem.symptom import Frame, Symptom

_FUNCTIONS: Final[tuple[tuple[Phase, re.Pattern[str]], ...]] = (
    (
        "graph_capture",
        re.compile(
            r"capture_model|capture_end|capture_begin|capture_one_batch_size|_?capture_one|init_(?:cuda|device|decode_cuda|prefill_cuda)_graphs?"
            r"|_?capture_cudagraphs|capture_graph|^capture$|profile_cudagraph_memory"
        ),
    ),
    (
        "profiling",
        re.compile(
            r"profile_run|determine_available_memory|determine_num_available_blocks|profile_max_num|_?profile_multimodal"
        ),
    ),
    ("warmup", re.compile(r"compile_or_warm_up_model|_dummy_sampler_run|_dummy_pooler_run|kernel_warmup|^_?warm_?up")),
    (
        "pools",
        re.compile(
            r"_?allocate_kv_cache(?:_tensors)?|initialize_kv_cache|initialize_from_config|init_memory_pool|_init_pools"
            r"|_create_buffers|_init_mamba_pool|alloc(?:ate)?_memory_pool|init_cache_engine|initialize_cache|init_kv_cache"
        ),
    ),
    (
        "weights",
        re.compile(
            r"load_weights|create_weights|load_model|make_layers|^_?initialize_model$|process_weights_after_loading|download_and_load"
        ),
    ),
    ("wake_up", re.compile(r"^wake_up|resume_memory_occupation")),
    (
        "prefill",
        re.compile(
            r"forward_extend|_forward_prefill|^chunk_|chunked_fwd|chunk_gated|chunk_fwd|prefill_forward|forward_prefill"
        ),
    ),
    ("decode", re.compile(r"forward_decode|decode_forward|fused_recurrent|_forward_decode|selective_state_update")),
    (
        "serving",
        re.compile(
            r"execute_model|engine_step$|^run_engine_loop$|^run_busy_loop$|forward_batch_generation|event_loop|run_batch|forward_thread_func|^forward$|^_forward_core$|attention_core$"
        ),
    ),
)
"""Functions of both engines that belong to one phase only, the surest first: a dummy run goes through `forward` as well."""

_OF_A_FAILURE: Final[dict[str, Phase]] = {
    "start": "start",
    "weights": "weights",
    "draft_weights": "weights",
    "profiling": "profiling",
    "kv_pool": "pools",
    "pools": "pools",
    "draft_pools": "pools",
    "state_pool": "pools",
    "graph_capture": "graph_capture",
    "graphs": "graph_capture",
    "warmup": "warmup",
    "serving": "serving",
    "prefill": "prefill",
    "decode": "decode",
    "wake_up": "wake_up",
}
"""The phase of a failure in the server's report, in the words of an incident."""


def of_frames(frames: Iterable[Frame]) -> Phase | None:
    """The phase that the functions of a traceback name; None where none of them does."""
    names = [frame.function for frame in frames if frame.function]
    for phase, pattern in _FUNCTIONS:
        if any(pattern.search(name) for name in names):
            return phase
    return None


def of_server(server: Server | None, symptom: Symptom) -> Phase | None:
    """Where the server stood when it printed the line: by the failure in its report that stands on the same line."""
    if server is None:
        return None
    for failure in server.failures:
        if any(e.input == symptom.input and e.line == symptom.line for e in failure.evidence):
            return _OF_A_FAILURE.get(failure.phase)
    return None


def of(symptom: Symptom, frames: Iterable[Frame], server: Server | None) -> tuple[Phase, str]:
    """The phase and what it is told from; the line's own word first, then the traceback, then the server's position."""
    hint = _OF_A_FAILURE.get(symptom.phase_hint or "")
    if hint is not None:
        return hint, "the line itself"
    framed = of_frames(frames)
    stood = of_server(server, symptom)
    if framed is not None and framed != "serving":
        return framed, "the traceback"
    if stood is not None:
        return stood, "the lines before it"
    if framed is not None:
        return framed, "the traceback"
    return "unknown", ""
