"""ML701 to ML703: token figures that must not be compared, lines that contradict each other, figures that are none."""

from __future__ import annotations

from typing import Any, Final

from memledger import words as n
from memledger.findings.figures import NO_CONTEXT, Context, held, release, several_engines, where, whole
from memledger.ledger import Capacity, Entry, Evidence, Finding, Rank, Server, Severity

SENTINEL: Final = "17179869184"
"""2**64 bytes in GiB: what a driver prints for "not available"."""
TELLING: Final = 1.1
"""Ratio of what a pool serves to its printed tokens from which the figure misleads."""
_NEW_RULE_FROM: Final = (0, 20, 1)


def tokens_not_comparable(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML701: the printed token figure of a model with several kinds of layers depends on version and request length."""
    if server.framework != "vllm" or _context_parallel(server):
        return None
    for rank in server.ranks:
        capacity = rank.capacity
        tokens, length, requests = (
            capacity.kv_tokens,
            capacity.concurrency.tokens_per_request,
            capacity.concurrency.requests,
        )
        if not tokens or not length or not requests:
            continue
        served = requests * length
        detail = _pool(rank)
        several = bool(detail.get("includes_recurrent_state") or detail.get("state_padding_percent") is not None)
        several = several or bool(detail.get("groups"))
        evidence = tuple(e for entry in rank.entries if entry.account.startswith("kv_cache") for e in entry.evidence)
        version = release(server)
        if served >= TELLING * tokens + length / 100:
            text = (
                f"The printed {n.count(tokens)} KV tokens are blocks over groups of layers; requests of {n.count(length)} tokens fit "
                f"{requests:g} times, which is {n.count_short(round(served))} tokens. For this model (state or sliding-window layers) "
                "compare concurrency x length, not the token figure; 0.20.1 and later print that product."
            )
            return Finding("ML701", "token figure not comparable", "note", 0, text, evidence[:4])
        if several and (version is None or version >= _NEW_RULE_FROM):
            text = (
                f"The printed {n.count(tokens)} KV tokens are {requests:g} requests x {n.count(length)} tokens: with another "
                "--max-model-len the same pool prints another figure, and 0.20.0 and older print one several times smaller for "
                "a model with recurrent state."
            )
            return Finding("ML701", "token figure not comparable", "info", 0, text, evidence[:4])
    return None


def contradiction(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML702: two of the engine's own lines can't both be right."""
    found = [
        *_two_pool_figures(server),
        *_tokens_beyond_concurrency(server),
        *_two_token_counts(server),
        *_unlike_ranks(server),
    ]
    if not found:
        return None
    texts = list(dict.fromkeys(text for text, _, _ in found))
    size = max((abs(size) for _, size, _ in found), default=0)
    evidence = tuple(dict.fromkeys(e for _, _, lines in found for e in lines))[:6]
    text = " ".join(texts[:2]) + " No figure was adjusted."
    return Finding("ML702", "lines contradict each other", "note", size, text, evidence)


def _two_token_counts(server: Server) -> list[Contradiction]:
    """SGLang prints a pool's tokens with the pool and again in its capacity line."""
    for rank in server.ranks:
        capacity = rank.capacity
        for entry in rank.entries:
            tokens = entry.detail.get("tokens")
            if server.framework != "sglang" or entry.account not in {"kv_cache/k", "kv_cache/latent"}:
                continue
            if not isinstance(tokens, int) or not capacity.kv_tokens or capacity.kv_swa_tokens is not None:
                continue
            if abs(tokens - capacity.kv_tokens) > 0.01 * tokens:
                text = (
                    f"The KV cache is allocated for {n.count(tokens)} tokens{where(server, rank)}, and the server counts "
                    f"{n.count(capacity.kv_tokens)}."
                )
                return [(text, 0, entry.evidence)]
    return []


Contradiction = tuple[str, int, tuple[Evidence, ...]]


def _two_pool_figures(server: Server) -> list[Contradiction]:
    found: list[Contradiction] = []
    for rank in server.ranks:
        details = [e.detail for e in rank.entries if e.account.startswith("kv_cache/")]
        other = next((d["contradicted_bytes"] for d in details if "contradicted_bytes" in d), None)
        if isinstance(other, int):
            pool = held(rank, "kv_cache") - held(rank, "kv_cache/draft")
            text = f"One line gives the KV cache {n.gib(pool)} GiB{where(server, rank)}, another {n.gib(other)} GiB."
            found.append((text, pool - other, _lines(rank)))
    return found


def _tokens_beyond_concurrency(server: Server) -> list[Contradiction]:
    """Under no rule are the printed tokens more than concurrency x length (beyond a block and the figure's rounding)."""
    for rank in server.ranks:
        capacity = rank.capacity
        tokens, length, requests = (
            capacity.kv_tokens,
            capacity.concurrency.tokens_per_request,
            capacity.concurrency.requests,
        )
        if server.framework != "vllm" or not tokens or not length or requests is None or _context_parallel(server):
            continue
        most = (requests + 0.005) * length
        # The last block of a request may be partly used.
        slack = requests * (capacity.kv_block_tokens or 256)
        if tokens > 1.02 * most + slack:
            text = (
                f"{n.count(tokens)} KV tokens are printed, and {requests:g} requests of {n.count(length)}: "
                f"{n.count(round(requests * length))} tokens."
            )
            return [(text, 0, _lines(rank))]
    return []


def _unlike_ranks(server: Server) -> list[Contradiction]:
    """Ranks of one engine and stage that print the same tokens and different sizes for the same pool."""
    groups: dict[tuple[Any, ...], list[tuple[Rank, Entry]]] = {}
    for rank in server.ranks:
        for entry in rank.entries:
            tokens = entry.detail.get("tokens")
            if entry.account in {"kv_cache/k", "kv_cache/latent"} and tokens:
                groups.setdefault((rank.dp, rank.pp, entry.account, tokens, entry.detail.get("dtype")), []).append(
                    (rank, entry)
                )
    for (_, _, _, tokens, _), members in groups.items():
        least, most = (pick(members, key=lambda m: m[1].bytes) for pick in (min, max))
        apart = most[1].bytes - least[1].bytes
        if apart > most[1].tolerance_bytes + least[1].tolerance_bytes and apart > 0.02 * most[1].bytes:
            text = (
                f"{least[0].label} and {most[0].label} hold the same {n.count(tokens)} tokens in "
                f"{n.gib(least[1].bytes)} and {n.gib(most[1].bytes)} GiB."
            )
            return [(text, apart, (*least[1].evidence, *most[1].evidence))]
    return []


def sentinel(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML703: a figure of 2**64 bytes stands for "not available"."""
    evidence = tuple(
        dict.fromkeys(e for f in server.failures for e in f.evidence if SENTINEL in e.text.replace(",", ""))
    )
    if not evidence:
        return None
    text = (
        f'The {SENTINEL}.00 GiB in the message are 2**64 bytes, the driver\'s word for "not available": no process holds that, '
        "and it is no hidden 16 GiB either. The figure is left out of every sum."
    )
    severity: Severity = "note"
    return Finding("ML703", "a figure that is none", severity, 0, text, evidence[:4])


def state_blocks(server: Server, _: Context = NO_CONTEXT) -> Finding | None:
    """ML805: more requests may run than the hybrid's pool has blocks; each holds a state block."""
    if server.framework != "vllm" or any(f.kind == "state_blocks_too_few" for f in server.failures):
        return None
    if several_engines(server):
        return None
    for rank in server.ranks:
        capacity: Capacity = rank.capacity
        seqs, blocks, detail = capacity.max_running_requests, capacity.kv_blocks, _pool(rank)
        hybrid = detail.get("includes_recurrent_state") or detail.get("state_padding_percent") is not None
        if hybrid and seqs and blocks and seqs > blocks:
            text = (
                f"{n.count(seqs)} requests may run (--max-num-seqs), each holds at least one state block, and the pool has "
                f"{n.count(blocks)} blocks: no more than {n.count(blocks - 1)} can run, and 0.20.0 and later refuse to start."
            )
            return Finding("ML805", "more requests than state blocks", "warning", 0, text, _lines(rank))
    return None


def _context_parallel(server: Server) -> bool:
    """Whether context parallelism multiplies the printed tokens (0.10.2 to 0.19.1)."""
    return any((whole(server.config.get(name)) or 1) > 1 for name in ("dcp_size", "pcp_size"))


def _pool(rank: Rank) -> dict[str, Any]:
    return next((e.detail for e in rank.entries if e.account == "kv_cache/pool"), {})


def _lines(rank: Rank) -> tuple[Evidence, ...]:
    found = tuple(e for entry in rank.entries if entry.account.startswith("kv_cache") for e in entry.evidence)
    return tuple(dict.fromkeys(found))[:4]
