"""Each finding: when it fires, what it says, and when it keeps silent."""

import msgspec
import pytest
from sample_reports import HYBRID_CAPACITY, SLOT_BYTES, at, dense, dense_rank, gib, hybrid, hybrid_rank, rank, report

from memledger import findings
from memledger.ledger import Effect, Failure, Gpu, Usage, entry
from memledger.units import GIB, MIB


def found(server, code):
    return next((f for f in findings.find(server) if f.code == code), None)


def with_capacity(**changes):
    return (hybrid_rank(capacity=msgspec.structs.replace(HYBRID_CAPACITY, **changes)),)


class TestIdleSlots:
    def test_says_what_is_reserved_what_ran_and_what_was_never_needed(self):
        finding = found(hybrid(), "ML101")
        assert finding.severity == "warning"
        assert "17.9 GiB is recurrent state for 124 slots, room for 24 requests at 5 each" in finding.text
        assert "At most 3 ever ran: 15.6 GiB were never needed" in finding.text
        assert finding.bytes == pytest.approx((124 - 15) * SLOT_BYTES, rel=1e-3)
        assert [e.line for e in finding.evidence] == [87]

    def test_the_remedy_is_the_smallest_pool_for_whole_requests_with_one_to_spare(self):
        finding = found(hybrid(), "ML101")
        (remedy,) = finding.remedies
        assert remedy.flags == ("--max-mamba-cache-size", "20")
        assert "--max-mamba-cache-size 20 serves 4 requests and gives 575K KV tokens instead of 330K" in finding.text
        by_account = {e.account or e.capacity: e for e in remedy.effects}
        assert by_account["recurrent_state"].bytes == pytest.approx(-104 * SLOT_BYTES, rel=1e-3)
        # What the state gives up, less what is not a whole token.
        assert by_account["kv_cache"].bytes == pytest.approx(-by_account["recurrent_state"].bytes, abs=65536)
        assert by_account["state_slots"] == Effect(capacity="state_slots", change=-104)
        assert by_account["kv_tokens"].change == pytest.approx(104 * SLOT_BYTES / 65536, rel=2e-3)

    def test_silent_without_serving_lines(self):
        assert found(hybrid(usage=Usage()), "ML101") is None

    def test_silent_when_the_slots_are_needed(self):
        assert found(hybrid(usage=Usage(peak_running_requests=24, seen=True)), "ML101") is None

    def test_slots_that_were_held_count_as_needed(self):
        usage = Usage(peak_running_requests=3, peak_state_slots=100, seen=True)
        finding = found(hybrid(usage=usage), "ML101")
        assert "100 slots were held" in finding.text
        assert finding.bytes == pytest.approx(24 * SLOT_BYTES, rel=1e-3)
        assert finding.remedies[0].flags[1] == "105"

    def test_a_rounded_usage_is_taken_at_its_largest(self):
        usage = Usage(peak_running_requests=3, peak_state_usage=0.5, seen=True)
        assert found(hybrid(usage=usage), "ML101").bytes == pytest.approx((124 - 63) * SLOT_BYTES, rel=1e-3)

    def test_without_the_slots_of_one_request_no_number_is_advised(self):
        finding = found(hybrid(ranks=with_capacity(slots_per_request=None, max_running_requests=20)), "ML101")
        assert finding.remedies == ()
        assert "At most 15 were ever held" in finding.text
        assert "How many slots one request takes (3 or 5) is not in the log" in finding.text

    def test_without_the_slots_of_one_request_nor_a_count_of_held_ones_it_is_silent(self):
        ranks = with_capacity(slots_per_request=None, max_running_requests=20)
        server = hybrid(ranks=ranks, usage=Usage(peak_running_requests=3, seen=True))
        assert found(server, "ML101") is None

    def test_where_the_engine_chose_the_cap_itself_it_tells_the_slots_of_one_request(self):
        text = found(hybrid(ranks=with_capacity(slots_per_request=None)), "ML101").text
        assert "room for 24 requests at 5 each (124 slots // 24 requests)" in text

    def test_a_request_cap_below_the_slots_is_named(self):
        text = found(hybrid(ranks=with_capacity(max_running_requests=8)), "ML101").text
        assert "No more than 8 may run: 40 slots." in text

    def test_a_single_request_may_be_the_warm_up_and_weighs_less(self):
        assert found(hybrid(usage=Usage(peak_running_requests=1, seen=True)), "ML101").severity == "note"

    def test_no_remedy_for_versions_that_ignore_the_flag(self):
        assert found(hybrid(framework_version="0.5.5.post1"), "ML101").remedies == ()
        assert found(hybrid(framework_version="0.5.7"), "ML101").remedies != ()

    def test_no_remedy_number_for_several_engines(self):
        assert found(hybrid(config={"dp_size": 2}), "ML101").remedies == ()

    def test_no_token_figure_where_pools_of_two_kinds_share_the_room(self):
        window = entry("kv_cache/swa_k", gib(1.0), "logged", stage="pools")
        base = hybrid_rank()
        server = hybrid(ranks=(msgspec.structs.replace(base, entries=(*base.entries, window)),))
        assert all(e.capacity != "kv_tokens" for e in found(server, "ML101").remedies[0].effects)

    def test_vllm_reserves_no_slots(self):
        assert found(hybrid(framework="vllm"), "ML101") is None


class TestCeiling:
    FULL = Usage(peak_running_requests=24, peak_queued_requests=9, peak_kv_usage=0.64, peak_state_usage=1.0, seen=True)

    def test_full_slots_and_idle_kv_are_the_opposite_verdict(self):
        finding = found(hybrid(usage=self.FULL), "ML102")
        assert "The state slots are the ceiling" in finding.text
        assert "KV usage stayed at 64 %" in finding.text
        assert "Up to 9 requests waited" in finding.text
        assert finding.severity == "warning"
        assert found(hybrid(usage=self.FULL), "ML101") is None

    def test_running_at_the_cap_is_enough(self):
        usage = Usage(peak_running_requests=24, peak_kv_usage=0.3, peak_state_usage=0.8, seen=True)
        assert found(hybrid(usage=usage), "ML102").severity == "note"

    def test_slots_and_the_request_cap_can_bind_together(self):
        text = found(hybrid(usage=self.FULL, config={"max_running_requests": 24}), "ML102").text
        assert text.startswith("The state slots and the running requests asked for bind together")

    def test_without_a_radix_cache_full_slots_and_nearly_full_kv_bind_together(self):
        """80 slots for 80 requests, state usage 1.00, KV 0.89."""
        usage = Usage(
            peak_running_requests=80, peak_queued_requests=63, peak_kv_usage=0.89, peak_state_usage=1.0, seen=True
        )
        ranks = with_capacity(state_slots=80, slots_per_request=None, max_running_requests=80)
        config = {"prefix_caching": False, "max_running_requests": 80}
        finding = found(hybrid(ranks=ranks, config=config, usage=usage), "ML102")
        assert finding.severity == "note"
        assert finding.text.startswith(
            "The state slots and the running requests asked for bind together: state usage reached 100 %"
        )
        assert "KV usage reached 89 %" in finding.text

    @pytest.mark.parametrize("change", [{"peak_kv_usage": 0.97}, {"peak_kv_usage": None}])
    def test_silent_when_kv_is_used_or_not_known(self, change):
        assert found(hybrid(usage=msgspec.structs.replace(self.FULL, **change)), "ML102") is None

    def test_silent_when_there_are_slots_left(self):
        assert found(hybrid(), "ML102") is None


class TestCapped:
    def test_names_the_number_asked_for(self):
        finding = found(hybrid(config={"max_running_requests": 32}), "ML103")
        assert "cap the running requests at 24 of the 32 asked for: 124 slots at 5 a request" in finding.text
        assert finding.severity == "note"

    def test_a_cap_that_was_not_reached_gets_no_advice(self):
        assert (
            "At most 3 ran, so the cap was not reached."
            in found(hybrid(config={"max_running_requests": 32}), "ML103").text
        )

    def test_half_of_what_was_asked_for_is_a_warning(self):
        """8 requests accepted, 2 run: 10 slots at 5 a request."""
        ranks = with_capacity(state_slots=10, max_running_requests=2)
        finding = found(hybrid(ranks=ranks, config={"max_running_requests": 8}, usage=Usage()), "ML103")
        assert finding.severity == "warning"
        assert "at 2 of the 8 asked for: 10 slots at 5 a request." in finding.text

    def test_the_slots_for_all_are_paid_with_kv_tokens(self):
        ranks = with_capacity(state_slots=20, max_running_requests=4)
        (remedy,) = found(hybrid(ranks=ranks, config={"max_running_requests": 32}, usage=Usage()), "ML103").remedies
        assert remedy.flags == ("--max-mamba-cache-size", "160")
        effects = {e.account or e.capacity: e for e in remedy.effects}
        assert effects["recurrent_state"].bytes == pytest.approx(140 * SLOT_BYTES, rel=1e-3)
        assert effects["kv_cache"].bytes == pytest.approx(-effects["recurrent_state"].bytes, abs=65536)
        assert effects["kv_tokens"].change == pytest.approx(-140 * SLOT_BYTES / 65536, rel=2e-3)

    def test_silent_where_as_many_run_as_were_asked_for(self):
        assert found(hybrid(config={"max_running_requests": 24}), "ML103") is None

    def test_silent_where_something_else_binds(self):
        assert found(hybrid(ranks=with_capacity(max_running_requests=10)), "ML103") is None


NUMBERS = {
    "gpu_index": 0,
    "requested_bytes": 786 * MIB,
    "free_bytes": 141 * MIB,
    "total_bytes": round(79.11 * GIB),
    "torch_allocated_bytes": round(68.83 * GIB),
}


class TestFailure:
    def test_the_failure_in_words_with_its_figures(self):
        server = dense(state="failed", failures=(Failure("cuda_oom", "warmup", NUMBERS, at(90)),))
        finding = found(server, "ML201")
        assert finding.severity == "error"
        assert finding.bytes == 786 * MIB
        assert finding.text == (
            "The GPU ran out of memory in the warm-up: 786 MiB asked for on GPU 0, 141 MiB free of 79.1 GiB, 68.8 GiB allocated by torch."
        )

    def test_the_failure_that_explains_comes_before_its_consequences(self):
        first, second = (
            Failure("child_died", "startup", {"rank": 1}, at(89)),
            Failure("cuda_oom", "graph_capture", NUMBERS, at(90)),
        )
        finding = found(dense(state="failed", failures=(first, second)), "ML201")
        assert finding.text.startswith("The GPU ran out of memory while capturing CUDA graphs: 786 MiB asked for")
        assert [e.line for e in finding.evidence] == [90, 89]

    def test_another_kind_is_named(self):
        both = (Failure("kv_pool", "pools", {"free_bytes": 5 * MIB}), Failure("graph_capture", "graph_capture"))
        assert found(dense(failures=both), "ML201").text.endswith("Also: graph capture.")

    @pytest.mark.parametrize(
        ("kind", "numbers", "text"),
        [
            (
                "kv_too_small",
                {
                    "max_model_len": 199104,
                    "needed_bytes": round(7.57 * GIB),
                    "available_bytes": round(7.4 * GIB),
                    "estimated_max_model_len": 192576,
                },
                "One request of 199,104 tokens needs 7.57 GiB of KV cache, and 7.40 GiB are there: --max-model-len 192576 would fit.",
            ),
            (
                "kv_too_small",
                {"max_model_len": 8192, "kv_tokens": 4096},
                "One request may have 8,192 tokens, and the KV cache holds 4,096.",
            ),
            (
                "kv_too_small",
                {"memory_fraction": 0.2},
                "No KV token fits after the weights at --mem-fraction-static 0.2.",
            ),
            (
                "free_memory_too_small",
                {"free_bytes": 20 * GIB, "total_bytes": 80 * GIB, "requested_bytes": 72 * GIB, "memory_fraction": 0.9},
                "At the start 20.00 of 80.00 GiB were free, less than the 72.00 GiB asked for (--gpu-memory-utilization 0.9): "
                "60.00 GiB were in use by others or by this process's own context.",
            ),
            (
                "weights_leave_no_kv",
                {"memory_fraction": 0.2, "raise_above": 0.31, "minimum_viable": 0.3012},
                "The weights leave no room for the KV cache at --mem-fraction-static 0.2: it has to be above 0.31.",
            ),
            (
                "weights_leave_no_kv",
                {"memory_fraction": 0.85, "raise_above": 1.0},
                "The weights leave no room for the KV cache at --mem-fraction-static 0.85: no fraction is enough, the weights fill the GPU.",
            ),
            (
                "weights_leave_no_kv",
                {"memory_fraction": 0.45},
                "The weights leave no room for the KV cache at --mem-fraction-static 0.45.",
            ),
            (
                "state_blocks_too_few",
                {"max_num_seqs": 256, "kv_blocks": 190},
                "256 requests may run, each holds at least one state block, and there are 190: --max-num-seqs 190 would fit.",
            ),
            (
                "state_no_memory",
                {"slots": -29, "rest_bytes": -90 * MIB},
                "There is no room for the recurrent state after the weights: slots -29, rest -90 MiB.",
            ),
        ],
    )
    def test_sentences_of_their_own(self, kind, numbers, text):
        assert found(dense(failures=(Failure(kind, "pools", numbers),)), "ML201").text == text

    def test_what_the_line_advises_in_figures_is_a_remedy(self):
        numbers = {
            "max_model_len": 199104,
            "needed_bytes": 8 * GIB,
            "available_bytes": 7 * GIB,
            "estimated_max_model_len": 192576,
        }
        (remedy,) = found(dense(failures=(Failure("kv_too_small", "kv_pool", numbers),)), "ML201").remedies
        assert remedy.flags == ("--max-model-len", "192576")
        assert remedy.effects[0].change == 192576 - 199104

    def test_other_processes_are_summed_without_those_whose_size_is_not_known(self):
        numbers = {
            "requested_bytes": MIB,
            "other_processes": [{"pid": 1, "bytes": 3 * GIB}, {"pid": 2, "bytes": None}, {"pid": 3, "bytes": GIB}],
        }
        assert (
            "4.00 GiB held by 2 other processes"
            in found(dense(failures=(Failure("cuda_oom", "serving", numbers),)), "ML201").text
        )

    def test_a_kind_without_a_sentence_still_says_phase_and_figures(self):
        text = found(dense(failures=(Failure("new_kind", "serving", {"pool_tokens": 512}, ()),)), "ML201").text
        assert text == "The server failed while serving (new kind): pool tokens 512."

    def test_silent_where_nothing_failed(self):
        assert found(dense(), "ML201") is None


class TestBalance:
    def leaking(self, tp=0, missing=3.0):
        entries = (
            entry("weights/model", gib(10.0), "logged", stage="weights"),
            entry("free", gib(10.0), "logged", stage="final", evidence=at(9)),
        )
        readings = [("weights", 13.5), ("warmup", 10.5 + 3.0 - missing), ("final", 10.0)]
        return rank(
            20.0 + missing + 0.5,
            [("weights", 10.5 + missing), ("warmup", 10.5), ("final", 10.0)],
            entries,
            tp=tp,
            candidates={"warmup": ("cuBLAS",)},
        ), readings

    def test_unexplained_names_stage_bytes_and_candidates(self):
        server = dense(ranks=(self.leaking()[0],))
        finding = found(server, "ML301")
        assert "3.50 GiB (14.9 %) is held by nothing that the log names" in finding.text
        assert "3.00 GiB of it went between the pools and graph capture (candidates: cuBLAS)" in finding.text
        assert finding.bytes == pytest.approx(3.5 * GIB, abs=MIB)
        assert finding.severity == "warning"

    def test_the_worst_rank_is_named(self):
        server = dense(ranks=(self.leaking(0, 1.0)[0], self.leaking(1, 3.0)[0]))
        assert "on TP1" in found(server, "ML301").text

    def test_over_counted_is_another_finding(self):
        entries = (
            entry("weights/model", gib(15.0), "logged", stage="weights"),
            entry("free", gib(10.0), "logged", stage="final"),
        )
        finding = found(dense(ranks=(rank(23.0, [("weights", 10.0)], entries),)), "ML302")
        assert "2.00 GiB (8.7 %) more than free memory fell" in finding.text
        assert finding.bytes == pytest.approx(-2 * GIB, abs=MIB)

    def test_silent_when_closed(self):
        assert found(hybrid(), "ML301") is None
        assert found(hybrid(), "ML302") is None

    @pytest.mark.parametrize(("size", "fires"), [(5.0, True), (1.0, False), (2.9, False)])
    def test_memory_in_use_before_the_start(self, size, fires):
        entries = (
            entry("in_use_at_start", gib(size), "derived", stage="init"),
            entry("free", gib(80 - size), "logged", stage="final"),
        )
        finding = found(dense(ranks=(rank(80.0, [("init", 80 - size)], entries, base="device"),)), "ML303")
        assert (finding is not None) is fires
        if fires:
            assert "5.00 GiB was in use before" in finding.text


class TestHost:
    def with_host(self, size, kind="cuda"):
        base = dense_rank(gpu=Gpu(kind=kind))
        return dense(
            ranks=(msgspec.structs.replace(base, entries=(*base.entries, entry("host/kv_cache", gib(size), "logged"))),)
        )

    def test_host_memory_is_told_but_is_no_part_of_the_gpu(self):
        finding = found(self.with_host(20.0), "ML401")
        assert "20.0 GiB in host memory (kv cache)" in finding.text
        assert finding.severity == "info"

    def test_much_host_memory_is_worth_a_note(self):
        assert found(self.with_host(100.0), "ML401").severity == "note"

    def test_silent_for_a_cpu_build_and_for_trifles(self):
        assert found(self.with_host(20.0, "cpu"), "ML401") is None
        assert found(self.with_host(0.1), "ML401") is None


def test_what_is_known_beside_the_log_reaches_every_finding(monkeypatch):
    seen = []
    monkeypatch.setattr(findings, "_FAMILIES", (lambda server, context: seen.append(context),))
    given = findings.Context()
    findings.attach(report(hybrid(), dense()), lambda server: given)
    assert [context is given for context in seen] == [True, True]


def test_attach_gives_every_server_its_findings_and_drops_old_ones():
    once = findings.attach(report(hybrid(), dense()))
    assert findings.attach(once) == once
    assert "ML101" in {f.code for f in once.servers[0].findings}
    assert once.servers[1].findings == ()
