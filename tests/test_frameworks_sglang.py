"""What SGLang's lines mean: small logs, one trap each."""

from __future__ import annotations

import pytest

from memledger.events import Event
from memledger.frameworks.sglang import SglangReader
from memledger.grammar import RuleSet, load_rules
from memledger.ledger import Rank, Server, account_total
from memledger.scan import Scanner
from memledger.units import GIB, MIB

RULES: RuleSet = load_rules()


def events(text: str) -> list[Event]:
    return list(Scanner(RULES).events(iter([text.encode()]), 0))


def servers(text: str) -> list[Server]:
    reader = SglangReader()
    for event in events(text):
        reader.feed(event)
    return reader.servers()


def server(text: str) -> Server:
    found = servers(text)
    assert len(found) == 1, f"{len(found)} servers"
    return found[0]


def rank(text: str) -> Rank:
    found = server(text).ranks
    assert len(found) == 1, f"{len(found)} ranks"
    return found[0]


def log(*messages: str, ranks: str = " TP0", day: str = "2026-03-01") -> str:
    return "".join(f"[{day} 10:{i // 60:02}:{i % 60:02}{ranks}] {m}\n" for i, m in enumerate(messages))


def size(found: Rank, account: str) -> float | None:
    """GiB at or under an account, two decimals; None where there is no entry."""
    amount = account_total(found.entries, account)
    return None if amount is None else round(amount.bytes / GIB, 2)


def accounts(found: Rank) -> set[str]:
    return {e.account for e in found.entries}


def stages(found: Rank) -> list[tuple[str, float | None, float | None]]:
    def gib(value: int | None) -> float | None:
        return None if value is None else round(value / GIB, 2)

    return [(s.name, gib(s.free_before_bytes), gib(s.free_after_bytes)) for s in found.stages]


ARGS = (
    "server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.85, max_running_requests=None, "
    "context_length=None, tp_size=1, pp_size=1, dp_size=1, ep_size=1, nnodes=1, attention_backend='triton', "
    "disable_radix_cache=False, speculative_algorithm={spec}, speculative_num_draft_tokens={tokens})"
)
PLAIN = ARGS.format(spec="None", tokens="None")
EAGLE = ARGS.format(spec="'EAGLE'", tokens="4")
CAPACITY = (
    "max_total_num_tokens=330323, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=24, "
    "context_len=262144, available_gpu_mem=8.90 GB"
)
WEIGHTS = (
    "Load weight begin. avail mem=78.48 GB",
    "Load weight end. elapsed=9.52 s, type=LlamaForCausalLM, avail mem=50.01 GB, mem usage=28.47 GB.",
)
POOLS = (
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB",
    "Memory pool end. avail mem=29.60 GB",
)
GRAPHS = (
    "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2], avail mem=29.10 GB",
    "Capture target decode CUDA graph end. elapsed=4.76 s, mem usage=0.10 GB, avail mem=29.00 GB.",
)
START = (PLAIN, *WEIGHTS, *POOLS, *GRAPHS, CAPACITY.replace("8.90", "28.95"))


class TestOrdinaryStart:
    def test_entries_stages_and_free_memory(self):
        found = rank(log(*START))
        assert size(found, "weights/model") == 28.47
        assert (size(found, "kv_cache/k"), size(found, "kv_cache/v")) == (10.08, 10.08)
        assert size(found, "cuda_graphs/decode") == 0.1
        assert size(found, "free") == 28.95
        assert stages(found) == [
            ("weights", 78.48, 50.01),
            ("pools", 50.01, 29.6),
            ("warmup", 29.6, 29.1),
            ("graphs", 29.1, 29.0),
            ("final", 29.0, 28.95),
        ]

    def test_stage_residuals_sum_to_the_residual(self):
        found = rank(log(*START))
        assert sum(s.residual.bytes or 0 for s in found.stages) == found.residual.bytes
        assert found.residual.base == "first_reading"

    def test_budget_is_a_share_of_what_was_free_before_loading(self):
        budget = rank(log(*START)).budget
        assert budget.slack_bytes is not None
        assert round(budget.slack_bytes / GIB, 2) == round(78.48 * 0.15, 2)
        assert "78.48" in (budget.rule or "")

    def test_single_gpu_without_label_is_tp_0(self):
        found = rank(log(*START, ranks=""))
        assert (found.tp, found.dp, found.pp) == (0, None, None)

    def test_request_table_is_derived_from_the_capacity_line(self):
        found = rank(log(*START))
        entry = next(e for e in found.entries if e.account == "request_tables")
        assert (entry.basis, entry.stage) == ("derived", "pools")
        assert entry.bytes == 25 * (262144 + 4) * 4  # this wording is of 0.5.13 or later: one row more than requests

    def test_request_table_covers_both_rules_where_the_version_is_open(self):
        text = log(WEIGHTS[0], "Load weight end. avail mem=50.01 GB, mem usage=28.47 GB.", POOLS[1], CAPACITY)
        entry = next(e for e in rank(text).entries if e.account == "request_tables")
        row = (262144 + 4) * 4
        assert entry.bytes - entry.tolerance_bytes <= 24 * row
        assert entry.bytes + entry.tolerance_bytes >= 25 * row

    def test_usage_of_weights_gives_the_reading_before_them(self):
        found = rank(log(WEIGHTS[1], *POOLS))
        assert stages(found)[0] == ("weights", 78.48, 50.01)

    def test_excerpt_that_starts_after_the_weights_has_no_opening(self):
        found = rank(log(*POOLS))
        assert found.residual.bytes is None
        assert found.residual.verdict == "open"
        assert stages(found) == [("pools", None, 29.6)]
        assert found.stages[0].residual.bytes is None

    def test_interval_without_a_closing_reading_is_not_balanced(self):
        found = rank(log(*WEIGHTS, POOLS[0]))
        assert (found.residual.bytes, found.residual.verdict) == (None, "open")
        assert stages(found) == [("weights", 78.48, 50.01)]

    def test_load_that_never_ends_keeps_its_start(self):
        assert stages(rank(log(WEIGHTS[0]))) == [("weights", 78.48, None)]

    def test_device_total_opens_the_ledger_where_a_line_prints_it(self):
        line = (
            "Failed to get GPU memory capacity from nvidia-smi. Falling back to torch.cuda.mem_get_info(). "
            "Reported total GPU memory per device (MiB): [81559], using min: 81559 MiB."
        )
        found = rank(log(line, *START))
        assert found.gpu.total_bytes == 81559 * MIB
        assert found.residual.base == "device"
        assert size(found, "in_use_at_start") == round(81559 / 1024 - 78.48, 2)
        assert stages(found)[0] == ("init", round(81559 / 1024, 2), 78.48)
        assert sum(s.residual.bytes or 0 for s in found.stages) == found.residual.bytes

    def test_pool_lines_left_out_of_an_excerpt_make_the_rank_open(self):
        found = rank(log(*WEIGHTS, POOLS[1], CAPACITY))
        assert found.residual.verdict == "open"
        assert "KV pool" in (found.residual.reason or "")


class TestOldReleases:
    def test_weights_without_usage_are_begin_minus_end_and_open(self):
        text = log(
            WEIGHTS[0],
            "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=50.01 GB",
            "KV Cache is allocated. K size: 10.08 GB, V size: 10.08 GB.",
            POOLS[1],
        )
        found = rank(text)
        entry = next(e for e in found.entries if e.account == "weights/model")
        assert entry.basis == "derived"
        assert size(found, "weights/model") == 28.47
        assert found.residual.verdict == "open"

    def test_pool_without_a_size_line_is_taken_from_readings_and_open(self):
        text = log(
            WEIGHTS[0],
            "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=50.01 GB",
            POOLS[1],
        )
        found = rank(text)
        assert size(found, "kv_cache/pool") == 20.41
        assert found.residual.verdict == "open"

    def test_missing_pool_line_of_a_newer_release_is_not_made_up(self):
        assert "kv_cache/pool" not in accounts(rank(log(*WEIGHTS, POOLS[1])))

    def test_gpu_prefix_of_0_2(self):
        found = rank(
            "[gpu=0] Load weight begin. avail mem=78.48 GB\n"
            "[gpu=0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=50.01 GB\n"
            "[gpu=0] Memory pool end. avail mem=9.10 GB\n"
        )
        assert found.tp == 0
        assert size(found, "kv_cache/pool") == 40.91

    def test_order_of_usage_and_reading_swapped(self):
        found = rank(
            log(
                *WEIGHTS, *POOLS, "Capture cuda graph end. Time elapsed: 9.01 s. avail mem=28.10 GB. mem usage=1.41 GB."
            )
        )
        assert size(found, "cuda_graphs/decode") == 1.41
        assert stages(found)[-1] == ("graphs", 29.51, 28.1)

    def test_capture_without_figures_makes_no_entry(self):
        found = rank(
            log(
                *WEIGHTS,
                *POOLS,
                "Capture cuda graph begin. This can take up to several minutes.",
                "Capture cuda graph end. Time elapsed: 9.01 s",
            )
        )
        assert size(found, "cuda_graphs") is None


class TestDraft:
    NEW = (
        EAGLE,
        *WEIGHTS,
        "Load weight begin. avail mem=50.04 GB",
        "Load weight end. elapsed=1.2 s, type=LlamaForCausalLMEagle3, avail mem=48.50 GB, mem usage=1.54 GB.",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB",
        "Memory pool end. avail mem=28.10 GB",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 0.63 GB, V size: 0.63 GB",
        "Memory pool end. avail mem=26.80 GB",
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1], avail mem=26.00 GB",
        "Capture target verify CUDA graph end. elapsed=3.00 s, mem usage=0.60 GB, avail mem=25.40 GB.",
        "Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1], avail mem=25.40 GB",
        "Capture draft decode CUDA graph end. elapsed=0.77 s, mem usage=0.45 GB, avail mem=24.95 GB.",
        "Capture draft extend CUDA graph end. elapsed=0.77 s, mem usage=0.15 GB, avail mem=24.80 GB.",
        CAPACITY.replace("8.90", "24.80"),
    )
    OLD = (
        EAGLE,
        *WEIGHTS,
        "KV Cache is allocated. #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB",
        "Memory pool end. avail mem=29.60 GB",
        "Capture cuda graph begin. This can take up to several minutes. avail mem=29.10 GB",
        "Capture cuda graph end. Time elapsed: 8.04 s. mem usage=1.10 GB. avail mem=28.00 GB.",
        "Init torch distributed begin.",
        "Init torch distributed ends. mem usage=0.00 GB",
        "Load weight begin. avail mem=28.00 GB",
        "Load weight end. type=LlamaForCausalLMEagle3, dtype=torch.bfloat16, avail mem=26.40 GB, mem usage=1.60 GB.",
        "KV Cache is allocated. #tokens: 330323, K size: 0.63 GB, V size: 0.63 GB",
        "Memory pool end. avail mem=25.10 GB",
        "Capture draft cuda graph begin. This can take up to several minutes. avail mem=26.50 GB",
        "Capture draft cuda graph end. Time elapsed: 7.03 s. mem usage=0.30 GB. avail mem=26.20 GB.",
        "Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=26.20 GB",
        "Capture draft extend cuda graph end. Time elapsed: 1.98 s. mem usage=0.20 GB. avail mem=26.00 GB.",
        CAPACITY.replace("8.90", "26.00"),
    )

    @pytest.mark.parametrize("lines", [NEW, OLD], ids=["before the pools", "after the target's capture"])
    def test_second_load_pool_and_capture_are_the_drafts(self, lines):
        found = rank(log(*lines))
        assert size(found, "weights/model") == 28.47
        assert size(found, "weights/draft") in {1.54, 1.6}
        assert size(found, "kv_cache/draft") == 1.26
        assert size(found, "kv_cache/k") == 10.08
        assert found.capacity.kv_tokens == 330323  # bytes of the draft's pool add, its tokens do not
        assert sum(s.residual.bytes or 0 for s in found.stages) == found.residual.bytes

    def test_verify_counts_as_decode_and_draft_captures_as_draft(self):
        found = rank(log(*self.NEW))
        assert size(found, "cuda_graphs/decode") == 0.6
        assert size(found, "cuda_graphs/draft") == 0.6

    def test_draft_before_the_pools(self):
        names = [s[0] for s in stages(rank(log(*self.NEW)))]
        assert names == ["weights", "draft_weights", "pools", "draft_pools", "warmup", "graphs", "final"]

    def test_reading_at_the_drafts_start_closes_no_stage_of_its_own(self):
        assert stages(rank(log(*self.NEW)))[1] == ("draft_weights", 50.01, 48.5)

    def test_draft_after_capture_has_its_own_warmup_and_capture(self):
        found = rank(log(*self.OLD))
        assert [s[0] for s in stages(found)] == [
            "weights",
            "pools",
            "warmup",
            "graphs",
            "draft_weights",
            "draft_pools",
            "warmup",
            "graphs",
            "final",
        ]
        captures = [s for s in found.stages if s.name == "graphs"]
        assert [round((s.residual.bytes or 0) / GIB, 2) for s in captures] == [0.0, 0.0]

    def test_memory_that_comes_back_is_a_negative_residual_not_a_second_start(self):
        found = rank(log(*self.OLD))
        second = [s for s in found.stages if s.name == "warmup"][1]
        assert round((second.residual.bytes or 0) / GIB, 2) == -1.4

    def test_excerpt_of_a_drafts_line_alone(self):
        found = rank(
            log(
                "Load weight end. elapsed=3.86 s, type=Glm5NextForConditionalGenerationNextN, quant=fp8, fmt=e4m3, avail mem=16.18 GB, mem usage=2.39 GB."
            )
        )
        assert size(found, "weights/draft") == 2.39
        assert size(found, "weights/model") is None

    def test_drafts_kernel_line_does_not_replace_the_targets(self):
        text = log(
            *self.NEW[:5],
            "GDN kernel dispatcher: decode=TritonGDNKernel, extend=CuteDSLGDNKernel, verify=TritonGDNKernel packed_decode=True",
            "GDN kernel dispatcher: decode=FlashInferGDNKernel, extend=TritonGDNKernel, verify=TritonGDNKernel packed_decode=True",
        )
        config = server(text).config
        assert config["linear_attention_backend_prefill"] == "cutedsl"
        assert config["linear_attention_backend_decode"] == "triton"


class TestSlidingWindow:
    SWA = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 148717, K size: 10.21 GB, V size: 10.21 GB"
    FULL = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 185897, K size: 4.25 GB, V size: 4.25 GB"
    SUM = "SWAKVPool mem usage: 28.93 GB, swa size: 148717, full size: 185897"
    TOKENS = "Use sliding window memory pool. full_layer_tokens=185897, swa_layer_tokens=148717"

    @pytest.mark.parametrize(
        "lines",
        [
            (TOKENS, SWA, FULL, SUM),
            (SWA, FULL, SUM),
            (TOKENS, FULL, SWA),
            (SWA, FULL),
            ("Full " + FULL, "SWA " + SWA, SUM),
        ],
        ids=["all lines", "sum only", "tokens say, other order", "order alone", "labels"],
    )
    def test_two_pools_are_told_apart_and_the_sum_is_not_added(self, lines):
        found = rank(log(*WEIGHTS, *lines, "Memory pool end. avail mem=21.00 GB"))
        assert (size(found, "kv_cache/swa_k"), size(found, "kv_cache/k")) == (10.21, 4.25)
        assert size(found, "kv_cache") == 28.92
        assert (found.capacity.kv_tokens, found.capacity.kv_swa_tokens) == (185897, 148717)

    def test_pools_of_equal_size(self):
        lines = (
            "Use sliding window memory pool. full_layer_tokens=4096, swa_layer_tokens=4096",
            "KV Cache is allocated. #tokens: 4096, K size: 2.48 GB, V size: 2.48 GB",
            "KV Cache is allocated. #tokens: 4096, K size: 1.24 GB, V size: 1.24 GB",
        )
        found = rank(log(*WEIGHTS, *lines, POOLS[1]))
        assert (size(found, "kv_cache/swa_k"), size(found, "kv_cache/k")) == (2.48, 1.24)

    def test_repeated_token_line_is_one_fact(self):
        found = rank(log(*WEIGHTS, self.TOKENS, self.TOKENS, self.SWA, self.FULL, self.SUM, POOLS[1]))
        assert found.capacity.kv_swa_tokens == 148717
        assert size(found, "kv_cache") == 28.92

    def test_draft_pool_after_a_sliding_window_target(self):
        text = log(
            EAGLE, *WEIGHTS, self.SWA, self.FULL, self.SUM, POOLS[1], POOLS[0], "Memory pool end. avail mem=9.00 GB"
        )
        found = rank(text)
        assert size(found, "kv_cache/draft") == 20.16
        assert size(found, "kv_cache/k") == 4.25

    def test_swa_usage_has_its_own_peak(self):
        usage = server(
            log(
                "Decode batch, #running-req: 3, #full token: 10, full token usage: 0.10, #swa token: 4, swa token usage: 0.40, cuda graph: True, gen throughput (token/s): 1.00, #queue-req: 0"
            )
        ).usage
        assert (usage.peak_kv_usage, usage.peak_swa_usage) == (0.1, 0.4)


class TestLatent:
    def test_single_figure_is_latent(self):
        found = rank(log(*WEIGHTS, "KV Cache is allocated. #tokens: 383872, KV size: 19.36 GB", POOLS[1]))
        assert size(found, "kv_cache/latent") == 19.36
        assert "kv_cache/index" not in accounts(found)

    def test_index_keys_are_inside_where_the_model_is_sparse(self):
        args = PLAIN.replace("'triton'", "'dsa'")
        found = rank(
            log(
                args,
                *WEIGHTS,
                "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 383872, KV size: 19.36 GB",
                POOLS[1],
            )
        )
        entry = next(e for e in found.entries if e.account == "kv_cache/latent")
        assert entry.detail["includes_index"] is True

    def test_every_tp_rank_holds_its_own_copy(self):
        line = "KV Cache is allocated. #tokens: 383872, KV size: 19.36 GB"
        text = log(*WEIGHTS, line, POOLS[1]) + log(*WEIGHTS, line, POOLS[1], ranks=" TP1")
        assert [size(r, "kv_cache/latent") for r in server(text).ranks] == [19.36, 19.36]

    def test_labelled_index_pool_is_index(self):
        line = "MiniMax sparse index KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.50 GB, V size: 0.00 GB"
        found = rank(log(*WEIGHTS, POOLS[0], line, POOLS[1]))
        assert (size(found, "kv_cache/index"), size(found, "kv_cache/k")) == (0.5, 10.08)
        assert found.capacity.kv_tokens == 330323


class TestRecurrentState:
    MAMBA = "Mamba Cache is allocated. max_mamba_cache_size: 48, conv_state size: 0.05GB, ssm_state size: 2.58GB"

    def test_four_parts(self):
        line = self.MAMBA + " intermediate_ssm_state_cache size: 1.05GB intermediate_conv_window_cache size: 0.02GB "
        found = rank(log(*WEIGHTS, line, *POOLS))
        parts = ("conv", "ssm", "speculative_ssm", "speculative_conv")
        assert [size(found, f"recurrent_state/{p}") for p in parts] == [0.05, 2.58, 1.05, 0.02]
        assert found.capacity.state_slots == 48

    def test_other_engines_sentence_is_not_ours(self):
        line = "Mamba Cache is allocated. max_mamba_cache_size: 16, conv_state size: 0.10 GB, ssm_state size: 1.00 GB, intermediate_ssm_state_cache size: 0.50 GB"
        assert events(line + "\n") == []

    def test_slots_per_request_only_where_printed(self):
        cap = "max_running_requests is capped to 24 by the mamba state cache (max_mamba_cache_size=124, 5 state slots per request). To raise it: increase"
        mamba = self.MAMBA.replace("48", "124")
        with_line = rank(log(*WEIGHTS, cap, mamba, *POOLS, CAPACITY)).capacity
        without = rank(log(*WEIGHTS, mamba, *POOLS, CAPACITY)).capacity
        assert (with_line.slots_per_request, without.slots_per_request) == (5, None)
        assert with_line.max_running_requests == without.max_running_requests == 24

    def test_state_of_0_5_2_hides_its_intermediate_buffers(self):
        text = log(
            EAGLE, *WEIGHTS, "Mamba Cache is allocated. conv_state size: 0.10GB, ssm_state size: 2.00GB ", *POOLS
        )
        found = rank(text)
        entry = next(e for e in found.entries if e.account == "recurrent_state/speculative_ssm")
        assert (entry.basis, round(entry.bytes / GIB, 2)) == ("derived", 8.0)

    def test_replay_ring_takes_the_place_of_intermediate_states(self):
        ring = "GDN ReplaySSM ring buffers allocated (record_len=16, fold=True): d=0.210GB, k=0.105GB, g=0.002GB rawv=0.210GB, rawk=0.105GB"
        found = rank(log(EAGLE, *WEIGHTS, self.MAMBA, ring, *POOLS))
        assert size(found, "recurrent_state/speculative_ssm") == 0.63
        assert size(found, "recurrent_state/ssm") == 2.58

    def test_checkpoint_pool_is_added_once(self):
        line = "int8 mamba checkpoint pool: 96 slots, 1.10GB (qdata 1.00 + scale 0.05 + conv 0.05); active mamba pool 48 slots; free HBM 12.00GB"
        again = "int8 mamba checkpoint pool (1.10GB) is allocated from --mem-fraction-static headroom and is not reflected in max_total_num_tokens; ensure headroom covers it."
        found = rank(log(*WEIGHTS, self.MAMBA, POOLS[0], line, again, POOLS[1]))
        assert size(found, "recurrent_state") == 2.63 + 1.1

    def test_raised_slots_are_what_the_pool_prints(self):
        line = "mamba_size (40) is less than decode side's max_slots_needed (96 = 96 reqs * 1 slots/req), raising effective_mamba_size to 96"
        raised = server(log(*WEIGHTS, line, self.MAMBA.replace("48", "96"), *POOLS))
        found = raised.ranks[0]
        assert found.capacity.state_slots == 96
        assert size(found, "recurrent_state/ssm") == 2.58
        assert any("from 40 to 96" in note for note in raised.notes)

    def test_mamba_num_counts_slots_not_requests(self):
        usage = server(
            log(
                "Decode batch, #running-req: 3, #full token: 10, full token usage: 0.09, mamba num: 15, mamba usage: 0.31, cuda graph: True, gen throughput (token/s): 1.00, #queue-req: 2"
            )
        ).usage
        assert (usage.peak_running_requests, usage.peak_state_slots, usage.peak_state_usage) == (3, 15, 0.31)

    def test_flags_of_state_are_left_out_for_a_model_without_state(self):
        args = PLAIN[:-1] + ", mamba_ssm_dtype='float32', linear_attn_backend='triton', mamba_full_memory_ratio=0.9)"
        dense = server(log(args, *WEIGHTS, *POOLS)).config
        hybrid = server(log(args, *WEIGHTS, self.MAMBA, *POOLS)).config
        assert "state_dtype" not in dense
        assert "linear_attention_backend_decode" not in dense
        assert (hybrid["state_dtype"], hybrid["linear_attention_backend_decode"]) == ("float32", "triton")


class TestNotMemory:
    def test_addresses_are_not_memory_and_the_real_pool_comes_after_capture(self):
        text = log(
            *WEIGHTS,
            "KvVmmArena[target] ready: device=0 reserved_va=60.0 GiB granularity=2048 KiB handle_type=posix",
            "KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 900000, K size: 30.00 GB, V size: 30.00 GB",
            "Memory pool end. avail mem=49.80 GB",
            *GRAPHS,
            "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 412000, KV size: 25.15 GB, avail mem=3.10 GB",
        )
        found = rank(text)
        assert size(found, "kv_cache") == 25.15
        assert found.capacity.kv_tokens == 412000

    def test_early_allocated_line_of_0_5_16_is_superseded(self):
        late = "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 412000, KV size: 12.15 GB, avail mem=16.10 GB"
        assert size(rank(log(*WEIGHTS, *POOLS, *GRAPHS, late)), "kv_cache") == 12.15

    def test_shared_buffer_is_counted_once(self):
        text = log(
            *WEIGHTS,
            "[unified-memory-pool] UNIFIED MEMORY POOL ENABLED -- path=Mamba hybrid",
            "[unified-memory-pool] UnifiedKVPool allocated: total_bytes=20.00 GB (=21474836480 B), 2 sub-pool(s)",
            "[unified-memory-pool]   sub-pool 'mamba': kind=mamba, layer_num=48, grow=up, entry_bytes=153944064, max_slots=139, min_slot_index=1 (slots [0,1) reserved)",
            "Mamba Cache is allocated. max_mamba_cache_size: 120, conv_state size: 0.34GB, ssm_state size: 17.58GB ",
            POOLS[0],
            "Memory pool end. avail mem=30.00 GB",
        )
        found = rank(text)
        assert size(found, "kv_cache") == 20.0
        assert size(found, "recurrent_state") is None
        entry = next(e for e in found.entries if e.account == "kv_cache/pool")
        assert (entry.bytes, entry.tolerance_bytes) == (21474836480, 0)

    @pytest.mark.parametrize(
        "line",
        [
            "Reserving 0.10 GB of the KV budget for post-sizing multimodal allocations (feature-transport pools + embedding cache).",
            "DeepGEMM masked layout budget: 2.00 GiB from 8.00 GiB free.",
            "Required memory for warmup: 2.10GB, Available memory: 8.00GB",
            "DSV4 memory calculation: bytes_per_full_token=1024.00, available_bytes=20.00 GB, full_token=4096",
            "The available memory for KV cache is 20.12 GB.",
            "Using CUDA IPC for multimodal features: reserving up to 1024 MiB on base GPU 0 across 1 tokenizer worker(s).",
            "CUDA IPC multimodal feature pools reserve 1024 MiB total on GPU 0 (1024 MiB per tokenizer worker × 1; configured budget 1024 MiB).",
            "MLATokenToKVPoolHost dummy mode: allocator-only, size=400000 tokens, saving 26.21 GB host memory",
            "HiCache auto-sizing: ratio 2.000 -> 1.500; 120.0 GiB host memory per rank (fraction 0.80, 8 ranks on this host), host pools 118.0 GiB.",
            "Graph pool pre-carved: 1.25 GB",
        ],
    )
    def test_plans_and_announcements_are_no_entries(self, line):
        assert accounts(rank(log(*START[:5], line, *START[5:]))) == accounts(rank(log(*START)))

    def test_progress_of_a_capture_is_a_state(self):
        bars = "Capturing batches (bs=8 avail_mem=12.00 GB):  50%|#####     | 1/2 [00:02<00:00,  1.10s/it]\n"
        assert events(bars) == []

    def test_host_pools_are_decimal_and_outside_the_devices_ledger(self):
        line = "Allocating 120.00 GB host memory for hierarchical KV cache."
        mamba = "Allocating 18.00 GB host memory for hierarchical Mamba cache (124 state slots, layout=layer_first)."
        with_host, without = rank(log(*START, line, mamba)), rank(log(*START))
        assert account_total(with_host.entries, "host/kv_cache").bytes == 120 * 10**9
        assert account_total(with_host.entries, "host/recurrent_state").bytes == 18 * 10**9
        assert with_host.residual == without.residual
        assert size(with_host, "recurrent_state") is None

    def test_workspace_inside_a_capture_is_not_added_to_it(self):
        line = "Full-CG prefill workspace: 512 MB (max bucket 8192 tokens, 64 request slots)"
        inside = rank(log(*START[:6], line, *START[6:]))
        before = rank(log(*START[:5], line, *START[5:]))
        assert size(inside, "workspace") is None
        assert size(before, "workspace") == 0.5

    def test_communication_before_loading_is_part_of_what_is_in_use_at_the_start(self):
        line = "All Reduce config: symmetric_memory = 32.00 MB, local_buffer = 8.00 MB, multicast = True, pull = False"
        assert "communication" not in accounts(rank(log(line, *START)))

    def test_second_initialisation_of_a_draft_takes_nothing(self):
        text = log(
            "Init torch distributed begin.", "Init torch distributed ends. mem usage=1.46 GB", *TestDraft.OLD[1:]
        )
        assert sum(1 for e in server(text).ranks[0].entries if e.account == "non_torch") == 0
        assert len(servers(text)) == 1

    def test_weight_update_at_run_time_is_no_new_load(self):
        found = rank(log(*START, "Update engine weights online from disk begin. avail mem=9.10 GB"))
        assert size(found, "weights") == 28.47

    def test_weights_of_another_process_are_said(self):
        found = server(log(PLAIN, "[IpcModelLoader] Mapped 410 tensors", *WEIGHTS, *POOLS))
        assert any("another process" in note for note in found.notes)


class TestFree:
    def test_available_memory_is_free_not_an_amount_to_add(self):
        found = rank(log(*START))
        free = [e for e in found.entries if e.account == "free"]
        assert len(free) == 1
        assert free[0].detail["reading"] == "available_gpu_mem"

    def test_ranks_without_the_line_end_at_their_last_reading(self):
        text = log(*START) + log(*START[1:-1], ranks=" TP1")
        ranks = server(text).ranks
        assert size(ranks[1], "free") == 29.0
        assert ranks[1].entries[-1].detail["reading"] == "last reading (graphs)"

    def test_adapter_that_takes_nothing_makes_no_entry(self):
        lines = (
            "LoRA adapter loading starts: LoRARef(lora_id=ab). avail mem=50.00 GB",
            "LoRA adapter loading completes: LoRARef(lora_id=ab). avail mem=50.00 GB",
        )
        assert "weights/lora" not in accounts(rank(log(*START[:3], *lines, *START[3:])))


class TestCapacityAndConfig:
    def test_requested_and_effective_requests_are_kept_apart(self):
        args = PLAIN.replace("max_running_requests=None", "max_running_requests=32")
        found = server(log(args, *WEIGHTS, *POOLS, CAPACITY))
        assert found.config["max_running_requests"] == 32
        assert found.ranks[0].capacity.max_running_requests == 24

    def test_what_is_not_printed_is_absent(self):
        config = server(log(*WEIGHTS, *POOLS)).config
        for name in ("tp_size", "memory_fraction", "max_running_requests", "prefix_caching", "context_length"):
            assert config.get(name) is None

    def test_nested_dump_in_both_forms(self):
        call = "server_args=ServerArgs(model_path='/models/m', tp_size=2, cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend='full', max_bs=8), prefill=PhaseConfig(backend='breakable', max_bs=4096)), disable_radix_cache=True)"
        literal = "server_args={'model_path': '/models/m', 'tp_size': 2, 'cuda_graph_config': {'decode': {'backend': 'full', 'max_bs': 8}, 'prefill': {'backend': 'breakable', 'max_bs': 4096}}, 'disable_radix_cache': True}"
        one, other = server(log(call)), server(log(literal))
        assert one.config == other.config
        assert one.model == "/models/m"
        assert (one.config["graph_max_batch"], one.config["prefix_caching"]) == (8, False)

    def test_command_line_where_there_is_no_dump(self):
        text = "command=python3 -m sglang.launch_server --model-path /models/m --tp 4 --mem-fraction-static 0.7 --disable-radix-cache --context-length 8192\n"
        config = server(text + log(*WEIGHTS, ranks=" TP0")).config
        assert (config["tp_size"], config["memory_fraction"], config["prefix_caching"], config["context_length"]) == (
            4,
            0.7,
            False,
            8192,
        )

    def test_dump_wins_over_the_command_line(self):
        text = "command=python3 -m sglang.launch_server --model-path /models/m --mem-fraction-static 0.7\n"
        assert server(text + log(PLAIN, *WEIGHTS)).config["memory_fraction"] == 0.85

    def test_dump_cut_in_a_number_does_not_give_that_number(self):
        config = server(log("server_args=ServerArgs(model_path='/models/m', tp_size=2, context_length=2621")).config
        assert config["tp_size"] == 2
        assert config.get("context_length") is None

    def test_chunk_size_in_effect_is_the_capacity_lines(self):
        args = PLAIN[:-1] + ", chunked_prefill_size=8192)"
        assert (
            server(log(args, CAPACITY.replace("chunked_prefill_size=8192", "chunked_prefill_size=2048"))).config[
                "chunked_prefill_tokens"
            ]
            == 2048
        )

    def test_dtype_of_the_pool_line(self):
        config = server(
            log(PLAIN[:-1] + ", kv_cache_dtype='fp8_e5m2')", *WEIGHTS, POOLS[0].replace("bfloat16", "float8_e5m2"))
        ).config
        assert (config["kv_cache_dtype"], config["kv_cache_dtype_requested"]) == ("torch.float8_e5m2", "fp8_e5m2")

    def test_capacity_line_cut_after_its_first_figure_is_not_believed(self):
        found = rank(log(*WEIGHTS, *POOLS, "max_total_num_tokens=3303"))
        assert found.capacity.kv_tokens == 330323

    def test_bare_capacity_line_of_a_benchmark_is(self):
        found = rank(log(*WEIGHTS, POOLS[1]) + "max_total_num_tokens=473854\n")
        assert found.capacity.kv_tokens == 473854

    def test_numbers_with_commas(self):
        found = rank(
            log(*WEIGHTS, "KV Cache is allocated. #tokens: 15,809,808, K size: 8.38 GB, V size: 5.59 GB", POOLS[1])
        )
        assert found.capacity.kv_tokens == 15809808
        assert (size(found, "kv_cache/k"), size(found, "kv_cache/v")) == (8.38, 5.59)

    def test_engines_of_data_parallel_ranks(self):
        capacity = CAPACITY.replace("=24,", "=4,")
        text = "".join(log(*WEIGHTS, *POOLS, capacity, ranks=f" DP{i} TP0") for i in range(2))
        found = server(text)
        assert [e.dp for e in found.engines] == [0, 1]
        assert [e.capacity.kv_tokens for e in found.engines] == [330323, 330323]
        assert [(r.dp, r.tp) for r in found.ranks] == [(0, 0), (1, 0)]

    def test_backend_names_are_normalised(self):
        config = server(
            log(
                PLAIN,
                "Using hybrid attention backend for decode and prefill: decode_backend=flashinfer, prefill_backend=fa3.",
            )
        ).config
        assert (config["attention_backend_decode"], config["attention_backend_prefill"]) == ("flashinfer", "fa3")

    def test_workspace_is_assumed_for_the_named_backend_only_where_a_reading_can_show_it(self):
        args = PLAIN.replace("'triton'", "'flashinfer'")
        found = rank(log(args, *START[1:]))
        entry = next(e for e in found.entries if e.account == "workspace")
        assert (entry.basis, entry.stage, entry.bytes) == ("assumed", "warmup", 384 * MIB)
        assert entry.tolerance_bytes > 0
        assert "workspace" not in accounts(rank(log(args, *START[1:5])))
        assert "workspace" not in accounts(rank(log(*START)))


class TestUsage:
    def test_peaks_of_prefill_and_decode(self):
        usage = server(
            log(
                "Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.30, #running-req: 9, #queue-req: 4, #pending-token: 0, cuda graph: False, input throughput (token/s): 1.00",
                "Decode batch, #running-req: 6, #token: 1920, token usage: 0.94, cuda graph: True, gen throughput (token/s): 446.45, #queue-req: 5",
            )
        ).usage
        assert (usage.peak_running_requests, usage.peak_queued_requests, usage.peak_kv_usage) == (9, 5, 0.94)

    def test_largest_scheduler_counts_not_the_sum(self):
        line = "Decode batch, #running-req: {n}, #token: 1920, token usage: 0.10, cuda graph: True, gen throughput (token/s): 4.00, #queue-req: 0"
        found = server(log(line.format(n=6), ranks=" DP0 TP0") + log(line.format(n=9), ranks=" DP1 TP4"))
        assert found.usage.peak_running_requests == 9
        assert [e.usage.peak_running_requests for e in found.engines] == [6, 9]

    def test_retractions_are_counted_and_are_no_failure(self):
        found = server(
            log(
                "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.1427 -> 0.3414",
                "Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.4000 -> 0.9000",
            )
        )
        assert found.usage.retractions == 3
        assert found.failures == ()

    def test_queue_of_a_decode_server_is_no_retraction(self):
        line = "Decode batch, #running-req: 1, #token: 192384, token usage: 0.87, pre-allocated usage: 0.58, #prealloc-req: 1, #transfer-req: 2, #retracted-req: 3, cpu graph: True, gen throughput (token/s): 1.00, #queue-req: 0"
        usage = server(log(line)).usage
        assert usage.retractions is None
        assert usage.peak_kv_usage == 0.87

    def test_accounting_check_is_neither_failure_nor_memory(self):
        assert (
            events(log("token_to_kv_pool_allocator memory leak detected! available_size=100, protected_size=0")) == []
        )


class TestFailures:
    @pytest.mark.parametrize(
        ("line", "kind", "phase"),
        [
            ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.85", "kv_too_small", "pools"),
            ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.94. Raise --mem-fraction-static above 0.942 (minimum viable = 1 - available/pre = 0.9411).", "weights_leave_no_kv", "pools"),
            ("RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=3, mamba_ratio=5, resulting max_num_reqs=0. Try: (1)", "state_pool_too_small", "pools"),
            ("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=60.12, local_gpu_memory=78.98, local_gpu_memory * 0.9=71.08", "unbalanced", "weights"),
            ("ValueError: Not enough host memory available. Requesting 120.00 GB but only have 64.00 GB free. Please reduce", "host_memory", "pools"),
            ("AssertionError: Not enough space for mamba ping pong idx, try to increase --mamba-full-memory-ratio.", "state_slots_exhausted", "serving"),
            ("RuntimeError: Capture prefill CUDA graph failed: ninja build failed", "graph_capture_failed", "graph_capture"),
        ],
    )  # fmt: skip
    def test_kind_and_phase(self, line, kind, phase):
        found = server(log(PLAIN, *WEIGHTS) + line + "\n")
        assert [(f.kind, f.phase) for f in found.failures] == [(kind, phase)]
        assert found.state == "failed"

    def test_numbers_are_bytes_and_fractions(self):
        line = "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size=-29 (total_rest_memory=-0.09 GB, mamba_cache_per_req=1.54 MB). Try: (1) reduce"
        numbers = server(log(*WEIGHTS) + line + "\n").failures[0].numbers
        assert numbers["state_slots"] == -29
        assert numbers["state_per_slot_bytes"] == round(1.54 * MIB)

    def test_fraction_of_a_failure_line_where_no_dump_is(self):
        line = "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.45.\n"
        assert server(line).config["memory_fraction"] == 0.45

    def test_negative_profile_is_a_failure(self):
        found = server(
            log(
                *WEIGHTS,
                "max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.",
            )
        )
        assert found.failures[0].kind == "kv_too_small"
        assert found.failures[0].numbers["profiled_tokens"] == -561981

    def test_same_failure_of_every_rank_is_one(self):
        line = "max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead."
        found = server("".join(log(line, ranks=f" TP{i}") for i in range(4)))
        assert len(found.failures) == 1
        assert len(found.failures[0].evidence) == 4

    def test_allocation_failure_has_the_phase_of_the_traceback(self):
        text = (
            log(*WEIGHTS, *POOLS, "Scheduler hit an exception: Traceback (most recent call last):")
            + '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 40, in run_scheduler_process\n'
            + '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/model_executor/model_runner.py", line 7, in init_attention_backend\n'
            + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 338.75 MiB is free.\n"
        )
        failure = next(f for f in server(text).failures if f.kind == "cuda_oom")
        assert failure.phase == "warmup"
        assert failure.numbers["requested_bytes"] == 384 * MIB

    def test_allocation_failure_in_a_capture(self):
        text = (
            log(*START[:6])
            + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 95.00 GiB of which 3.00 MiB is free.\n"
        )
        failure = server(text).failures[0]
        assert (failure.kind, failure.phase) == ("cuda_oom", "graph_capture")

    def test_stopped_server_is_not_failed(self):
        text = log(
            *START,
            "The server is fired up and ready to roll!",
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        )
        assert server(text).state == "stopped"

    @pytest.mark.parametrize(
        ("lines", "state"),
        [((PLAIN, *WEIGHTS), "starting"), ((*START, "The server is fired up and ready to roll!"), "serving")],
    )
    def test_states(self, lines, state):
        assert server(log(*lines)).state == state


class TestStarts:
    def test_restart_loop_with_dumps(self):
        failed = (
            log(PLAIN, *WEIGHTS)
            + "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.85.\n"
        )
        found = servers(failed + failed.replace("10:00", "10:05") + log(*START))
        assert [s.state for s in found] == ["failed", "failed", "starting"]

    def test_same_record_printed_twice_at_debug_level_is_one_start(self):
        assert len(servers(log(PLAIN, PLAIN, *WEIGHTS))) == 1

    def test_restart_without_a_dump(self):
        lines = (*WEIGHTS, *POOLS, *GRAPHS, CAPACITY)
        found = servers(log(*lines) + log(*lines, day="2026-03-02"))
        assert len(found) == 2
        assert [size(s.ranks[0], "weights/model") for s in found] == [28.47, 28.47]

    def test_restart_after_a_crash_before_the_capacity_line(self):
        text = log(*WEIGHTS, *POOLS) + log(*WEIGHTS, *POOLS, day="2026-03-02")
        assert len(servers(text)) == 2

    @staticmethod
    def pool(tokens: int, each: float, free: float) -> tuple[str, str]:
        return (
            f"KV Cache is allocated. #tokens: {tokens}, K size: {each} GB, V size: {each} GB",
            f"Memory pool end. avail mem={free} GB",
        )

    CAPTURED = "Capture cuda graph end. Time elapsed: 5.37 s. mem usage=1.50 GB. avail mem={} GB."

    def test_two_runs_compared_in_one_paste_are_two_servers(self):
        text = log(*self.pool(200000, 30.0, 16.0), self.CAPTURED.format("14.50"))
        text += log(*self.pool(400000, 15.0, 46.0), self.CAPTURED.format("44.50"))
        found = servers(text)
        assert [size(s.ranks[0], "kv_cache") for s in found] == [60.0, 30.0]
        assert [s.ranks[0].capacity.kv_tokens for s in found] == [200000, 400000]

    def test_capacity_lines_of_two_runs_are_two_servers(self):
        other = CAPACITY.replace("330323", "240000").replace("8.90", "12.50")
        found = servers(log(CAPACITY) + "with other settings:\n" + log(other))
        assert [s.ranks[0].capacity.kv_tokens for s in found] == [330323, 240000]
        assert len(servers(log(CAPACITY) + log(CAPACITY))) == 1

    def test_capture_after_a_start_that_has_ended_is_the_next_runs(self):
        text = log(self.CAPTURED.format("14.50"), CAPACITY)
        text += log(self.CAPTURED.format("24.50"), CAPACITY.replace("330323", "240000"))
        found = servers(text)
        assert [size(s.ranks[0], "cuda_graphs") for s in found] == [1.5, 1.5]
        assert [s.ranks[0].capacity.kv_tokens for s in found] == [330323, 240000]

    def test_captures_after_a_capacity_line_quoted_first_are_of_one_start(self):
        text = log(CAPACITY) + log(
            *GRAPHS, "Capture target prefill CUDA graph end. elapsed=9.5 s, mem usage=1.50 GB, avail mem=27.50 GB."
        )
        assert size(rank(text), "cuda_graphs") == 1.6

    def test_excerpt_quoted_before_the_whole_log_is_no_start_of_its_own(self):
        whole = log(*START)
        last = whole.splitlines(keepends=True)[-1]
        assert len(servers(last + whole)) == 1
        assert len(servers(START[-1] + "\n" + whole)) == 1
        assert len(servers(last.replace("28.95", "27.00") + whole)) == 2

    def test_small_pool_of_the_same_tokens_after_the_capture_is_a_drafts(self):
        text = log(*self.pool(200000, 30.0, 16.0), self.CAPTURED.format("14.50"), *self.pool(200000, 0.5, 13.0))
        assert size(rank(text), "kv_cache/draft") == 1.0

    def test_pools_of_ranks_without_their_names_are_no_drafts(self):
        text = log(*self.pool(200000, 30.0, 16.0), *self.pool(200000, 30.0, 16.1), ranks="")
        assert size(rank(text), "kv_cache") == 60.0

    def test_load_whose_end_is_not_in_the_log_leaves_the_ledger_open(self):
        found = rank(log(WEIGHTS[0], *POOLS, *GRAPHS))
        assert (found.residual.verdict, found.residual.reason) == ("open", "the weights' own line is not in the log")

    def test_sliding_window_pool_alone_does_not_give_its_tokens_to_the_other(self):
        text = log(
            "Use sliding window memory pool. full_layer_tokens=375000, swa_layer_tokens=300000",
            "KV Cache is allocated. #tokens: 300000, K size: 8.25 GB, V size: 5.50 GB",
        )
        found = rank(text).capacity
        assert (found.kv_tokens, found.kv_swa_tokens) == (375000, 300000)

    def test_other_ranks_may_end_after_rank_0(self):
        text = log(*START) + log(*START[1:-1], ranks=" TP1")
        assert len(servers(text)) == 1

    def test_ranks_interleaved_in_any_order(self):
        one, two = log(*START).splitlines(), log(*START[1:-1], ranks=" TP1").splitlines()
        mixed = [line for pair in zip(one, [*two, "", ""], strict=False) for line in pair if line]
        found = server("\n".join(mixed) + "\n")
        assert [size(r, "weights/model") for r in found.ranks] == [28.47, 28.47]
        assert [size(r, "cuda_graphs") for r in found.ranks] == [0.1, 0.1]

    def test_two_services_of_one_compose_file_are_two_servers(self):
        one = [f"llm-a-1  | {line}" for line in log(*START).splitlines()]
        two = [f"llm-b-1  | {line}" for line in log(*START).replace("28.47", "28.40").splitlines()]
        mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair) + "\n"
        found = servers(mixed)
        assert [s.label for s in found] == ["llm-a-1", "llm-b-1"]
        assert [size(s.ranks[0], "weights/model") for s in found] == [28.47, 28.4]

    def test_nodes_of_one_job_in_one_file_are_one_server(self):
        args = PLAIN.replace("nnodes=1", "nnodes=2, node_rank={n}, dist_init_addr='192.0.2.1:5000'").replace(
            "tp_size=1", "tp_size=2"
        )
        text = ""
        for node in range(2):
            lines = log(args.replace("{n}", str(node)), *WEIGHTS, *POOLS, ranks=f" TP{node}").splitlines(True)
            text += "".join(f"node-{node}-1  | {line}" for line in lines)
        assert [r.tp for r in server(text).ranks] == [0, 1]

    def test_two_servers_that_differ_in_more_than_the_node_stay_two(self):
        args = PLAIN.replace("nnodes=1", "nnodes=2, node_rank={n}")
        text = "".join(f"a-1  | {line}\n" for line in log(args.replace("{n}", "0"), *WEIGHTS).splitlines())
        other = args.replace("{n}", "1").replace("/models/m", "/models/other")
        text += "".join(f"b-1  | {line}\n" for line in log(other, *WEIGHTS).splitlines())
        assert len(servers(text)) == 2

    def test_notices_before_the_dump_belong_to_the_start_that_follows(self):
        notice = "Attention backend not specified. Use fa3 backend by default."
        bare = PLAIN.replace("'triton'", "None")
        found = servers(log(bare, *START[1:]) + log(notice, bare, *START[1:], day="2026-03-02"))
        assert [s.config.get("attention_backend_decode") for s in found] == [None, "fa3"]

    def test_command_at_the_end_of_a_file_belongs_to_the_server_before_it(self):
        text = (
            log(*WEIGHTS, *POOLS)
            + "command=python3 -m sglang.launch_server --model-path /models/m --mem-fraction-static 0.7\n"
        )
        assert server(text).config["memory_fraction"] == 0.7

    def test_usage_without_a_start(self):
        found = server(
            log(
                "Decode batch, #running-req: 6, #token: 1920, token usage: 0.94, cuda graph: True, gen throughput (token/s): 446.45, #queue-req: 5"
            )
        )
        assert found.ranks == ()
        assert found.state == "serving"
        assert found.started_at == "2026-03-01T10:00:00"

    def test_servers_may_be_asked_for_again(self):
        reader = SglangReader()
        found = events(log(*START))
        for event in found[:-1]:
            reader.feed(event)
        before = reader.servers()
        reader.feed(found[-1])
        assert before[0].ranks[0].capacity.max_running_requests is None
        assert reader.servers()[0].ranks[0].capacity.max_running_requests == 24

    def test_span_and_version(self):
        found = server("SGLang Version 0.5.18\n" + log(*START))
        assert found.framework_version == "0.5.18"
        assert [(s.first_line, s.last_line) for s in found.span] == [(1, 1 + len(START))]


class TestHost:
    def test_cpu_build_keeps_a_ledger_of_the_host(self):
        text = log(*WEIGHTS, *POOLS, CAPACITY.replace("available_gpu_mem", "available_cpu_mem"))
        found = rank(text)
        assert found.gpu.kind == "cpu"
        assert all(e.account.startswith("host/") for e in found.entries)
        assert size(found, "host/kv_cache/k") == 10.08

    def test_npu(self):
        found = rank(
            log(*WEIGHTS, *POOLS, "Capture npu graph end. Time elapsed: 8.04 s. mem usage=0.80 GB. avail mem=28.30 GB.")
        )
        assert found.gpu.kind == "npu"
        assert size(found, "cuda_graphs/decode") == 0.8


FRAMES = (
    '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 4025, in run_scheduler_process\n'
    '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/model_executor/model_runner.py", line 2408, in {}\n'
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which "
    "338.75 MiB is free. Including non-PyTorch memory, this process has 23.06 GiB memory in use. Of the allocated memory 22.33 "
    "GiB is allocated by PyTorch, and 210.80 MiB is reserved by PyTorch but unallocated.\n"
)
DIES = "Scheduler hit an exception: Traceback (most recent call last):"
QUIT = "[2026-03-01 10:00:09] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"


class TestCauses:
    def test_the_exception_of_the_scheduler_is_the_cause(self):
        text = (
            log(*START, CAPACITY, "The server is fired up and ready to roll!")
            + log(DIES)
            + FRAMES.format("forward_decode")
            + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
            + QUIT
            + "Killed\n"
        )
        found = server(text)
        assert found.state == "failed"
        assert [f.kind for f in found.failures] == ["cuda_error", "scheduler_exception", "process_died", "killed"]
        assert {f.phase for f in found.failures} == {"decode"}
        assert found.failures[0].numbers["cause"] == "CUDA error: an illegal memory access was encountered"

    def test_memory_is_the_cause_where_a_line_says_so(self):
        text = (
            log(*WEIGHTS, DIES)
            + FRAMES.format("init_memory_pool")
            + OUT_OF_MEMORY
            + "ValueError: on the way out\n"
            + QUIT
        )
        kinds = {f.kind: f.phase for f in server(text).failures}
        assert kinds == {"scheduler_exception": "pools", "cuda_oom": "pools", "process_died": "pools"}

    def test_the_allocators_warning_is_the_cause_where_nothing_else_is(self):
        warning = "[rank1]:[W906 07:46:05.008634648 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 1 while trying to allocate 4334813184 bytes (free: 3779919872, total: 287431131136).\n"
        found = server(warning + log(DIES, ranks=" DP1 TP1 EP1"))
        assert found.failures[0].kind == "cuda_oom"
        assert found.failures[0].numbers["requested_bytes"] == 4334813184
        assert server(warning + log(*START)).failures == ()

    def test_a_start_that_is_refused_has_failed(self):
        refused = "ValueError: the tensor parallel size has to divide the number of heads\n"
        found = server(log(PLAIN, ranks="") + refused)
        assert (found.state, found.failures[0].kind) == ("failed", "config_error")

    def test_an_exception_that_the_server_survives_is_no_failure(self):
        found = server(log(PLAIN) + "ImportError: no such module\n" + log(*WEIGHTS))
        assert (found.state, found.failures) == ("starting", ())

    @pytest.mark.parametrize(("code", "kinds"), [(-15, []), (-9, ["process_died"])])
    def test_a_server_that_is_told_to_end_does_not_fail_by_ending(self, code, kinds):
        decode = "Decode batch, #running-req: 6, #token: 1920, token usage: 0.94, cuda graph: True, gen throughput (token/s): 446.45, #queue-req: 5"
        end = (
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
            f"Subprocess scheduler_0 (pid=34) crashed with exit code {code}. Triggering SIGQUIT for cleanup...",
        )
        found = server(log(*START, CAPACITY, decode) + log(*end, ranks="") + QUIT)
        assert (found.state, [f.kind for f in found.failures]) == ("stopped", kinds)

    def test_the_token_pool_running_out_ends_the_scheduler(self):
        found = server(
            "RuntimeError: Prefill out of memory. Try to lower your batch size.\n" + log("Available mamba: 760")
        )
        assert found.state == "failed"


class TestWhoseAllocation:
    def test_it_is_the_rank_whose_scheduler_died(self):
        text = log("Memory pool end. avail mem=0.49 GB", ranks=" TP1") + log(DIES, ranks=" TP0") + OUT_OF_MEMORY
        found = server(text)
        assert [(r.tp, r.gpu.index, r.gpu.total_bytes is None) for r in found.ranks] == [(0, 0, False), (1, None, True)]
        assert size(found.ranks[1], "free") == 0.49
        assert accounts(found.ranks[0]) == set()

    def test_an_unlabelled_one_is_nobodys_among_several(self):
        text = log(*WEIGHTS, ranks=" TP0") + log(*WEIGHTS, ranks=" TP1") + OUT_OF_MEMORY
        assert all(r.gpu == r.gpu.__class__(kind=r.gpu.kind) for r in server(text).ranks)

    def test_the_hosts_process_id_of_a_container_is_no_other_process(self):
        line = OUT_OF_MEMORY.replace("Including non-PyTorch memory, this process has", "Process 77 has")
        numbers = server(log(*WEIGHTS) + line).failures[0].numbers
        assert numbers["process_bytes"] == round(23.06 * GIB)
        assert "other" not in numbers

    def test_the_pools_own_code_is_the_phase(self):
        frame = '  File "/opt/venv/lib/python3.11/site-packages/sglang/srt/mem_cache/memory_pool.py", line 499, in _init_state\n'
        assert server(log(PLAIN) + frame + OUT_OF_MEMORY).failures[0].phase == "pools"


class TestUsagePeaks:
    STATE = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB"

    def lines(self, *shares: float) -> str:
        slots = "Mamba Cache is allocated. max_mamba_cache_size: 40, conv_state size: 0.10GB, ssm_state size: 5.77GB "
        prefills = [
            f"Prefill batch, #new-seq: 1, #new-token: 237, #cached-token: 0, full token usage: 0.00, mamba usage: {share:.2f}, #running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 8.71"
            for share in shares
        ]
        decode = "Decode batch, #running-req: 1, #full token: 269, full token usage: 0.00, mamba num: 2, mamba usage: 0.05, cuda graph: False, gen throughput (token/s): 4.57, #queue-req: 0"
        return log(*WEIGHTS, slots, *POOLS, CAPACITY, *prefills, decode)

    def test_a_larger_share_is_more_slots_than_any_line_counts(self):
        usage = server(self.lines(0.10, 0.05)).usage
        assert (usage.peak_state_usage, usage.peak_state_slots) == (0.10, 4)

    def test_a_count_that_agrees_with_the_share_stays(self):
        assert server(self.lines(0.05)).usage.peak_state_slots == 2

    def test_without_the_slots_a_count_below_the_peak_is_not_the_peak(self):
        prefill, decode = self.lines(0.10).splitlines()[-2:]
        assert server(prefill + "\n" + decode + "\n").usage.peak_state_slots is None

    def test_a_prefill_shows_that_something_ran(self):
        prefill = self.lines(0.10).splitlines()[-2]
        usage = server(prefill + "\n").usage
        assert (usage.peak_running_requests, usage.ran_between_samples) == (0, True)


class TestWhatIsNoServer:
    def test_words_without_a_figure_are_prose(self):
        assert servers("Memory pool end.\nThen comes the capture.\n") == []

    def test_a_figure_or_the_engines_prefix_shows_a_server(self):
        assert len(servers("Memory pool end. avail mem=1.00 GB\n")) == 1
        assert len(servers(log("Memory pool end."))) == 1


class TestPoolsOfTheHost:
    def test_a_pool_in_whose_allocation_the_process_died_is_not_held(self):
        args = PLAIN.replace("nnodes=1", "nnodes=1, device='cpu'")
        died = "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.\n"
        found = server(log(args, *WEIGHTS, POOLS[0]) + died)
        assert "host/kv_cache/k" not in accounts(found.ranks[0])
        assert any("died before it was in place" in note for note in found.notes)
        assert "host/kv_cache/k" in accounts(server(log(args, *WEIGHTS, *POOLS)).ranks[0])

    def test_why_a_ledger_is_open_is_said_in_words(self):
        found = rank(log(*WEIGHTS, POOLS[0]))
        assert found.residual.reason == "no free-memory reading after the KV cache"


@pytest.mark.parametrize(("shares", "peak"), [(("9.24", "0.41"), 0.41), (("0.41", "1.02"), 1.02)])
def test_a_usage_far_above_one_is_no_fraction(shares: tuple[str, ...], peak: float) -> None:
    line = "Decode batch. #running-req: 1, #token: 100, token usage: {}, gen throughput (token/s): 10.00, #queue-req: 0"
    assert server(log(*(line.format(share) for share in shares))).usage.peak_kv_usage == peak


def test_negative_pool_sizes_are_no_entries() -> None:
    found = rank(
        log(
            "Load weight begin. avail mem=78.50 GB",
            "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.40 GB, mem usage=15.10 GB.",
            "KV Cache is allocated. #tokens: -4000, K size: -5.00 GB, V size: -5.00 GB",
            "Memory pool end. avail mem=63.40 GB",
        )
    )
    assert not any(e.bytes < 0 for e in found.entries)
    assert found.capacity.kv_tokens is None


def test_one_line_without_end_is_kept_once_and_leaves_the_rank_open() -> None:
    found = rank(log("Load weight begin. avail mem=78.50 GB", *["Memory pool end. avail mem=14.50 GB"] * 2000))
    assert len(found.stages) <= 250
    assert found.residual.verdict == "open"
    assert "more memory figures" in (found.residual.reason or "")


def test_a_free_reading_above_the_device_leaves_the_rank_open() -> None:
    failed = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB "
        "of which 1.00 GiB is free."
    )
    found = rank(
        log(
            "Load weight begin. avail mem=4096.00 GB",
            "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=4080.90 GB, mem usage=15.10 GB.",
            "KV Cache is allocated. #tokens: 400000, K size: 24.41 GB, V size: 24.41 GB",
            "Memory pool end. avail mem=4032.08 GB",
            failed,
        )
    )
    assert found.residual.verdict == "open"
    assert (found.residual.reason or "").startswith("the figures contradict each other: 4096.00 GiB free")


def test_many_usages_that_are_no_fractions_do_not_hide_the_peak() -> None:
    line = "Decode batch. #running-req: 1, #token: 100, token usage: {}, gen throughput (token/s): 10.00, #queue-req: 0"
    shares = ["9.24"] * 300 + [f"0.{10 + i % 70}" for i in range(600)]
    assert server(log(*(line.format(share) for share in shares))).usage.peak_kv_usage == 0.79


@pytest.mark.parametrize(("total", "unified"), [(122501, True), (81559, None)])
def test_a_total_that_only_a_card_with_unified_memory_has_says_so(total: int, unified: bool | None) -> None:
    """The driver's tool has no figure there, so that SGLang prints CUDA's; no line names the card."""
    found = rank(
        log(
            "Failed to get GPU memory capacity from nvidia-smi. Falling back to torch.cuda.mem_get_info(). "
            f"Reported total GPU memory per device (MiB): [{total}], using min: {total} MiB.",
            "Load weight begin. avail mem=16.69 GB",
            "Load weight end. elapsed=9.48 s, type=Qwen2ForCausalLM, avail mem=13.44 GB, mem usage=3.25 GB.",
        )
    )
    assert found.gpu.unified_memory is unified
