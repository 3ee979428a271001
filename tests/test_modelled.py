"""The model's arithmetic beside a log's figures. Architectures come from the bundled table."""

import msgspec
import pytest
from finding_helpers import concurrency, serving, sglang, vllm, worker

from memledger import findings, modelled, pipeline
from memledger.findings.figures import Context
from memledger.ledger import Capacity, Report, Stage, StageResidual
from memledger.model.find import Found, find
from memledger.units import GIB

HYBRID = find("Qwen/Qwen3.6-35B-A3B", look_here=False).architecture
NEXT = find("Qwen/Qwen3-Next-80B-A3B", look_here=False).architecture
DENSE = find("meta-llama/Meta-Llama-3.1-8B", look_here=False).architecture


def found(server, arch):
    checked = modelled.check_server(server, arch)
    return {f.code: f for f in findings.find(checked, Context(arch)) if f.code.startswith("ML9")}


def hybrid(pool=47.55, tokens=623_040, running=None, version="0.19.1", block=1056):
    """A server of the 35B hybrid on one GPU with the pool that it printed."""
    capacity = concurrency(tokens, 131_072, 18.44, kv_block_tokens=block)
    rank = worker(
        120,
        details={"kv_cache/pool": {"block_tokens": block}},
        kv_cache__pool=pool,
        weights__model=64.69,
        capacity=capacity,
    )
    usage = None if running is None else serving(running)
    return vllm(
        rank,
        version=version,
        usage=usage,
        tp_size=1,
        context_length=131_072,
        prefix_caching=False,
        kv_cache_dtype="auto",
    )


def next80b(k=2.58, ssm=1.42, conv=0.03, tp=4, dtype="torch.bfloat16"):
    rows = {"rows": 81, "slots": 80}
    rank = worker(
        60,
        details={"recurrent_state/conv": rows, "recurrent_state/ssm": rows, "kv_cache/k": {"tokens": 450_560}},
        kv_cache__k=k,
        recurrent_state__conv=conv,
        recurrent_state__ssm=ssm,
        capacity=Capacity(kv_tokens=450_560, state_slots=80),
    )
    return sglang(rank, version=None, tp_size=tp, page_size=128, kv_cache_dtype=dtype, state_dtype="float32")


def pool_of(server):
    return next(e for e in server.ranks[0].entries if e.account == "kv_cache/pool")


def test_the_split_sums_to_the_logged_pool_to_the_byte():
    server = hybrid(running=54)
    whole = pool_of(server)
    parts = modelled.split_server(modelled.check_server(server, HYBRID)).ranks[0].entries
    pieces = [e for e in parts if e.account.startswith(("kv_cache/", "recurrent_state/"))]
    assert {e.account for e in pieces} == {"kv_cache/pool", "recurrent_state/conv", "recurrent_state/ssm"}
    assert sum(e.bytes for e in pieces) == whole.bytes
    assert sum(e.tolerance_bytes for e in pieces) == whole.tolerance_bytes
    assert {e.basis for e in pieces} == {"modelled"}


def test_the_state_of_the_peak_is_counted_where_the_log_shows_one():
    ssm = modelled.split_server(modelled.check_server(hybrid(running=54), HYBRID)).ranks[0].entries
    state = [e for e in ssm if e.account.startswith("recurrent_state/")]
    one = state[0].detail["request_bytes"]
    # 30 layers of 1 MiB page and more: three blocks of ten pages of 1056 tokens x 2048 bytes.
    assert one == 3 * 10 * 1056 * 2048
    assert sum(e.bytes for e in state) == 54 * one
    assert state[0].detail["assumption"] == "state of 54 running requests, the most in the log"


def test_without_serving_lines_the_pool_is_split_as_filled_by_the_longest_requests():
    state = [
        e
        for e in modelled.split_server(modelled.check_server(hybrid(), HYBRID)).ranks[0].entries
        if e.account.startswith("recurrent_state/")
    ]
    assert state[0].detail["assumption"].startswith("if filled by 18.4")


def test_state_never_takes_more_than_the_pool():
    parts = modelled.split_server(modelled.check_server(hybrid(running=100_000), HYBRID)).ranks[0].entries
    assert min(e.bytes for e in parts) >= 0


def test_a_pool_that_the_model_does_not_give_is_not_split_and_said():
    server = hybrid(pool=30.0)
    checked = modelled.check_server(server, HYBRID)
    assert modelled.split_server(checked) == checked
    assert "ML902" in found(server, HYBRID)


def test_a_block_size_that_the_model_does_not_give_differs():
    assert pool_of(modelled.check_server(hybrid(block=544), HYBRID)).detail["modelled"].get("agrees") is not True


def test_an_unknown_version_is_refused_with_the_reason_and_nothing_is_split():
    server = hybrid(version="0.0.0+fork")
    checked = modelled.check_server(server, HYBRID)
    assert pool_of(checked).detail["modelled"]["bytes"] is None
    assert "vLLM" in pool_of(checked).detail["modelled"]["reason"]
    assert modelled.split_server(checked) == checked


def test_no_figure_is_changed_by_the_check():
    server = hybrid(running=3)
    checked = modelled.check_server(server, HYBRID)
    assert [(e.bytes, e.basis) for e in checked.ranks[0].entries] == [
        (e.bytes, e.basis) for e in server.ranks[0].entries
    ]


def test_what_state_takes_of_the_pool_is_told():
    finding = found(hybrid(), HYBRID)["ML904"]
    assert "61.9 MiB for each running request" in finding.text
    assert "ML904" not in found(hybrid(pool=30.0), HYBRID)


def test_pools_that_agree_give_no_finding():
    assert not {"ML902", "ML903"} & set(found(next80b(), NEXT))


def test_kv_for_layers_that_need_none_is_named():
    finding = found(next80b(k=10.32), NEXT)["ML902"]
    assert "10.3 GiB in the log, 2.58 GiB by the model's arithmetic" in finding.text
    assert "all 48 layers were given KV, the model needs 12" in finding.text
    assert finding.severity == "note"


def test_state_that_is_not_divided_over_the_gpus_is_named():
    finding = found(next80b(ssm=5.70, conv=0.13), NEXT)["ML903"]
    assert "not divided over the 4 GPUs" in finding.text


def test_weights_outside_the_range_are_a_finding_and_inside_are_none():
    def server(size):
        return vllm(worker(80, weights__model=size), tp_size=1)

    assert "ML901" not in found(server(14.99), DENSE)
    finding = found(server(16.5), DENSE)["ML901"]
    assert "16.5 GiB in the log, 15.0 GiB by the model's arithmetic" in finding.text


@pytest.mark.parametrize(
    "config", [{"enable_lora": True}, {"cpu_offload_gib": 4.0}, {"speculative_algorithm": "eagle3"}]
)
def test_weights_with_something_else_in_them_are_not_judged(config):
    server = vllm(worker(80, weights__model=16.5), tp_size=1, **config)
    assert "ML901" not in found(server, DENSE)


def test_state_wider_than_the_other_engines_default_is_told():
    finding = found(next80b(), NEXT)["ML905"]
    assert "--mamba-ssm-dtype bfloat16" in finding.text
    assert finding.bytes == pytest.approx(0.71 * GIB, rel=0.01)


def test_state_as_wide_as_the_other_engines_default_is_silent():
    # Qwen3.5's configs name float32, and both engines follow.
    assert "ML905" not in found(hybrid(running=54), HYBRID)
    assert "ML905" not in found(next80b(ssm=0.71), NEXT)


def test_the_source_says_which_architecture_was_used_or_what_one_would_add():
    report = Report("0", (), (), (hybrid(),))
    (source,) = modelled.checked(report, (Found(HYBRID, "bundled table: X"),)).sources
    assert (source.name, source.status, source.reason) == ("model", "ok", "bundled table: X")
    (source,) = modelled.checked(report, (find("no/such-model", look_here=False),)).sources
    assert source.status == "unavailable"
    assert "--model-config" in source.reason


def test_ranks_of_another_pipeline_stage_are_modelled_by_their_own_layers():
    server = vllm(worker(80, weights__model=7.5), tp_size=1, pp_size=2)
    rank = modelled.check_server(server, DENSE).ranks[0]
    assert "stage" in rank.entries[0].detail["modelled"]["reason"]
    placed = msgspec.structs.replace(server, ranks=(msgspec.structs.replace(server.ranks[0], pp=0),))
    assert modelled.check_server(placed, DENSE).ranks[0].entries[0].detail["modelled"]["bytes"] > 0


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("stage", [2, 7])
def test_a_rank_of_a_pipeline_stage_that_is_not_there_is_not_modelled(stage, pp_size):
    one = worker(80, weights__model=7.5, kv_cache__pool=30.0, capacity=Capacity(kv_tokens=100_000, kv_blocks=6250))
    server = vllm(msgspec.structs.replace(one, pp=stage), tp_size=1, pp_size=pp_size)
    entries = {e.account: e.detail.get("modelled") for e in modelled.check_server(server, DENSE).ranks[0].entries}
    assert (entries["kv_cache/pool"]["bytes"] is None) == (pp_size > 1)
    if pp_size > 1:
        assert entries["weights/model"]["reason"] == f"there is no pipeline stage {stage} of 2"


MTP = find("deepseek-ai/DeepSeek-R1", look_here=False).architecture
BACK = 129280 * 7168 * 2 * 5 // 4
"""Embedding on every GPU, a quarter of the head: two bytes an element."""


def drafting(rise, *, draft="DeepseekV3ForCausalLMNextN"):
    """A rank of 32 whose prediction module was loaded after the capture, and whose free memory then rose by `rise` GiB."""
    rank = worker(
        60.78,
        base="first_reading",
        details={"weights/draft": {"type": draft}, "kv_cache/draft": {"tokens": 235_008, "part": "kv"}},
        weights__model=30.18,
        weights__draft=2.77,
        kv_cache__draft=0.25,
        free=60.78 - 30.18 - 2.77 - 0.25 + rise,
    )
    before = 60.78 - 30.18 - 2.77 - 0.25
    stages = (
        Stage("weights", round(60.78 * GIB), round(30.6 * GIB), StageResidual(0, 5 * 2**20)),
        Stage("draft_weights", round(30.6 * GIB), round(27.83 * GIB), StageResidual(0, 5 * 2**20)),
        Stage("draft_pools", round(27.83 * GIB), round(before * GIB), StageResidual(0, 5 * 2**20)),
        Stage(
            "warmup", round(before * GIB), round((before + rise) * GIB), StageResidual(-round(rise * GIB), 10 * 2**20)
        ),
    )
    return sglang(
        msgspec.structs.replace(rank, stages=stages),
        tp_size=32,
        ep_size=32,
        dp_size=8,
        dp_attention=True,
        dp_lm_head=True,
        moe_dense_tp_size=1,
        moe_communication_backend="deepep",
        page_size=128,
        kv_cache_dtype="auto",
    )


def given_back(server):
    rank = modelled.check_server(server, MTP).ranks[0]
    return rank, [e for e in rank.entries if e.account == "released"]


def test_what_a_prediction_module_gives_back_is_an_entry_where_a_stage_shows_it():
    server = drafting(2.12)
    assert server.ranks[0].residual.verdict == "over_counted"
    rank, (entry,) = given_back(server)
    assert (entry.bytes, entry.basis, entry.stage) == (-BACK, "modelled", "warmup/draft")
    assert rank.stages[-1].residual.bytes == BACK - round(2.12 * GIB)
    assert rank.residual.bytes == server.ranks[0].residual.bytes + BACK
    assert rank.residual.verdict == "closed"
    assert rank.entries[-1].account == "free"
    assert sum(s.residual.bytes for s in rank.stages) == pytest.approx(rank.residual.bytes, abs=16)


@pytest.mark.parametrize(
    ("rise", "draft"),
    [
        (0.9, "DeepseekV3ForCausalLMNextN"),  # another size
        (0.0, "DeepseekV3ForCausalLMNextN"),  # nothing came back
        (2.12, "LlamaForCausalLMEagle3"),  # another model's draft
    ],
)
def test_a_rise_that_the_formula_does_not_give_stays_a_residual(rise, draft):
    server = drafting(rise, draft=draft)
    rank, entries = given_back(server)
    assert not entries
    assert rank.stages == server.ranks[0].stages
    assert rank.residual == server.ranks[0].residual


def test_a_prediction_modules_weights_and_pool_are_compared():
    rank, _ = given_back(drafting(2.12))
    said = {e.account: e.detail.get("modelled") for e in rank.entries}
    assert said["weights/draft"]["agrees"]
    assert said["kv_cache/draft"]["agrees"]
    assert said["kv_cache/draft"]["token_bytes"] == (512 + 64) * 2
    rank, _ = given_back(drafting(2.12, draft="LlamaForCausalLMEagle3"))
    said = {e.account: e.detail.get("modelled") for e in rank.entries}
    assert said["kv_cache/draft"]["bytes"] is None
    assert "draft" in said["kv_cache/draft"]["reason"]


def speculating(ssm, conv, version="0.5.16"):
    rows = {"slots": 48}
    rank = worker(
        80,
        details={"recurrent_state/speculative_ssm": rows, "recurrent_state/speculative_conv": rows},
        recurrent_state__speculative_ssm=ssm,
        recurrent_state__speculative_conv=conv,
        capacity=Capacity(max_running_requests=4, state_slots=48),
    )
    return sglang(rank, version=version, tp_size=4, speculative_draft_tokens=4, speculative_topk=1)


def test_speculative_states_are_compared_by_running_requests():
    # 36 layers, 5 rows, 4 draft tokens: 8 heads of 128 x 128 in float32; windows of 4 + 4 - 2 columns over 2,048 channels.
    ssm, conv = 36 * 5 * 4 * 8 * 128 * 128 * 4 / GIB, 36 * 5 * 2048 * 6 * 2 / GIB
    entries = modelled.check_server(speculating(ssm, conv), NEXT).ranks[0].entries
    assert [e.detail["modelled"]["agrees"] for e in entries] == [True, True]
    entries = modelled.check_server(speculating(2 * ssm, 4 * conv), NEXT).ranks[0].entries
    assert [e.detail["modelled"]["agrees"] for e in entries] == [False, False]
    entries = modelled.check_server(speculating(ssm, conv, version=None), NEXT).ranks[0].entries
    assert "version" in entries[0].detail["modelled"]["reason"]


def test_the_fixture_of_a_known_hybrid_is_split_with_its_padding_and_the_meaning_of_its_tokens():
    """Figures by hand: blocks of 10 x 1,056 x 2,048 bytes; 6 state blocks and 125 of KV in a request of 131,072 tokens."""
    (server,) = pipeline.explain(["fixtures/vllm-0.25-hybrid-known-model/server.log"]).servers
    checked = modelled.check_server(server, find(server.model, look_here=False).architecture)
    said = pool_of(checked).detail["modelled"]
    block = 10 * 1056 * 2048
    assert (said["block_tokens"], said["block_bytes"], said["blocks"]) == (1056, block, [2601, 2601])
    assert (said["agrees"], said["token_rule"]) == (True, "effective")
    assert said["tokens"] == [int(2601 / 131 * 131_072)] * 2
    state = said["state"]
    assert (state["request_blocks"], state["request_bytes"], state["page_padding_percent"]) == (6, 6 * block, 0.76)
    assert state["padding_bytes"] == 6 * block - 2 * 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    parts = {e.account: e.bytes for e in modelled.split_server(checked).ranks[0].entries}
    kv, conv, ssm = (parts[name] for name in ("kv_cache/pool", "recurrent_state/conv", "recurrent_state/ssm"))
    assert conv + ssm == 12 * 6 * block  # twelve requests at the peak
    assert kv + conv + ssm == pool_of(checked).bytes
    text = {f.code: f.text for f in findings.find(checked, Context(HYBRID))}
    assert "123.8 MiB for each running request" in text["ML904"]
    assert "960 KiB of it padding" in text["ML904"]
    assert "the same bytes print another figure at another maximum length" in text["ML904"]


def staged(pools, tokens, stages=(0, 1)):
    """The 35B hybrid over two pipeline stages: 15 layers with state and 5 with attention on each."""
    whole = hybrid(running=54)
    capacity = concurrency(tokens, 131_072, 37.0, kv_block_tokens=1056)
    ranks = tuple(
        msgspec.structs.replace(
            worker(
                120,
                details={"kv_cache/pool": {"block_tokens": 1056}},
                kv_cache__pool=pool,
                capacity=capacity,
            ),
            pp=stage,
        )
        for pool, stage in zip(pools, stages, strict=True)
    )
    return msgspec.structs.replace(whole, ranks=ranks, config={**whole.config, "pp_size": 2})


def test_the_stage_with_the_fewest_blocks_sets_the_pool_and_each_stage_holds_its_own_state():
    block = 5 * 1056 * 2048
    blocks = int(40.0 * GIB) // block
    server = staged((47.55, 40.0), blocks // 4 * 1056)
    checked = modelled.check_server(server, HYBRID)
    whole = pool_of(modelled.check_server(hybrid(running=54), HYBRID)).detail["modelled"]["state"]
    for rank in checked.ranks:
        (said,) = [e.detail["modelled"] for e in rank.entries if e.account == "kv_cache/pool"]
        assert said["agrees"]
        assert said["block_bytes"] == block
        assert said["state"]["request_bytes"] * 2 == whole["request_bytes"]
        assert said["state"]["ssm_bytes"] * 2 == whole["ssm_bytes"]
    for rank, pool in zip(modelled.split_server(checked).ranks, (47.55, 40.0), strict=True):
        held = [e for e in rank.entries if e.account.startswith(("kv_cache/", "recurrent_state/"))]
        assert len(held) == 3
        assert sum(e.bytes for e in held) == round(pool * GIB)


def test_a_stage_that_is_not_in_the_log_leaves_the_pool_undivided():
    server = staged((47.55, 40.0), 1_000_000, stages=(0, 0))
    said = pool_of(modelled.check_server(server, HYBRID)).detail["modelled"]
    assert said["bytes"] is None
    assert "stage 1" in said["reason"]


@pytest.mark.parametrize("size", [None, 0, -1, "1"])
def test_a_dense_size_that_is_none_is_not_used(size):
    server = drafting(2.12)
    odd = msgspec.structs.replace(server, config={**server.config, "moe_dense_tp_size": size})
    said = modelled.check_server(odd, MTP).ranks[0].entries[0].detail["modelled"]
    whole = modelled.check_server(server, MTP).ranks[0].entries[0].detail["modelled"]
    assert 0 < said["bytes"] < whole["bytes"]
