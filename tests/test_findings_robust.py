"""No log makes a finding raise: figures may be missing, zero, negative or absurd."""

import msgspec
from finding_helpers import concurrency, sglang, vllm, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_reports import report

from memledger import findings
from memledger.findings.catalogue import BY_CODE
from memledger.ledger import Budget, Failure, Usage
from memledger.report.text import render

NUMBERS = st.one_of(st.none(), st.integers(-5, 5), st.integers(-(2**62), 2**62))
FRACTIONS = st.one_of(st.none(), st.floats(0, 1), st.floats(-1e9, 1e9))
GIBS = st.one_of(st.floats(-5, 200), st.just(0.0))
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(st.none(), st.integers(-3, 10**7), st.floats(0, 1), st.booleans(), st.text(max_size=5))
        for name in (
            "max_running_requests",
            "context_length",
            "memory_fraction",
            "chunked_prefill_tokens",
            "prefix_caching",
            "state_cache_mode",
            "host_cache_gb",
            "host_available_bytes",
            "draft_checkpoint_bytes",
            "dp_size",
            "enable_lora",
            "max_loras",
            "speculative_draft_tokens",
        )
    },
)
KINDS = st.sampled_from(
    ["cuda_oom", "kv_too_small", "no_cache_blocks", "graph_capture", "killed", "free_memory_too_small"]
)


@st.composite
def ranks(draw):
    names = (
        "weights__model",
        "kv_cache__k",
        "kv_cache__pool",
        "recurrent_state__ssm",
        "cuda_graphs__total",
        "activations",
    )
    names += (
        "request_tables",
        "free",
        "reserve",
        "in_use_at_start",
        "non_torch",
        "host__kv_cache",
        "host__recurrent_state",
    )
    sizes = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(names, GIBS)))
    details = {
        "recurrent_state/ssm": {"rows": draw(st.integers(1, 500))},
        "kv_cache/pool": {
            "padding_layers_percent": draw(st.floats(0, 100)),
            "includes_recurrent_state": draw(st.booleans()),
        },
    }
    capacity = msgspec.structs.replace(
        concurrency(draw(NUMBERS), draw(NUMBERS), draw(FRACTIONS)),
        state_slots=draw(NUMBERS),
        slots_per_request=draw(st.one_of(st.none(), st.integers(0, 5))),
        max_running_requests=draw(NUMBERS),
        kv_blocks=draw(NUMBERS),
    )
    budget = Budget(
        graph_estimate_bytes=draw(NUMBERS), graph_estimate_charged=draw(st.one_of(st.none(), st.booleans()))
    )
    opening = draw(st.one_of(st.none(), st.floats(0.1, 300)))
    return worker(opening, tp=draw(st.integers(0, 3)), capacity=capacity, budget=budget, details=details, **sizes)


@settings(max_examples=150, deadline=None)
@given(
    make=st.sampled_from([vllm, sglang]),
    found=st.lists(ranks(), max_size=3),
    usage=st.builds(
        Usage,
        peak_running_requests=NUMBERS,
        peak_queued_requests=NUMBERS,
        peak_kv_usage=FRACTIONS,
        peak_state_usage=FRACTIONS,
        peak_swa_usage=FRACTIONS,
        preemptions=NUMBERS,
        peak_state_slots=NUMBERS,
    ),
    kinds=st.lists(st.tuples(KINDS, st.sampled_from(["serving", "graph_capture", "kv_pool"]), NUMBERS), max_size=2),
    version=st.one_of(st.none(), st.sampled_from(["0.5.18", "0.21.0", "0.8.5", "0.5.5", "x", "0.0.0+fork"])),
    config=CONFIG,
)
def test_any_server_gets_findings_with_pages(make, found, usage, kinds, version, config):
    failures = tuple(Failure(kind, phase, {"requested_bytes": size, "kv_usage": 0.1}) for kind, phase, size in kinds)
    server = make(*found, version=version, usage=usage, failures=failures, **config)
    shown = findings.attach(report(server))
    for finding in shown.servers[0].findings:
        assert finding.title == BY_CODE[finding.code].title
        assert finding.text.endswith((".", "?"))
    render(shown)
