"""The bytes that SGLang takes of a GPU for models, without an engine: its classes on torch's meta device.

    python -m tests.support.engine.sglang_sizes MODEL... TENSOR_PARALLEL...

It has a process of its own, as SGLang keeps one configuration in each. A line of JSON for each model and number of
processes: bytes of the weights of the first process, and of one token in its KV cache.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penstock.config import NetworkConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang.settings import server_args

NUM_TOKENS = 64
"""Of the cache that is made; SGLang adds a page."""
GROUPS = ("tp_group", "attn_tp_group", "moe_tp_group")
RANKS = ("tp_rank", "attn_tp_rank", "moe_ep_rank", "moe_tp_rank", "pp_rank", "attn_dp_rank", "attn_cp_rank")


def sizes_of(model: Path, tensor_parallel: int) -> dict[str, int]:
    """The first process's bytes."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.server_args import ServerArgs

    arguments: dict[str, Any] = server_args(
        RolloutConfig(tensor_parallel=tensor_parallel),
        NetworkConfig(),
        model,
        float32_head=False,
        bootstrap_port=1,
        cuda=False,
    )
    arguments = ServerArgs(**(arguments | {"dtype": "bfloat16"}))
    runtime_context.publish(arguments, role="scheduler")
    config = ModelConfig.from_server_args(arguments)
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
    group = SimpleNamespace(rank_in_group=0, world_size=tensor_parallel, cpu_group=None)
    first: dict[str, Any] = {**dict.fromkeys(RANKS, 0), **dict.fromkeys(GROUPS, group), "pp_group": alone}
    first["moe_ep_group"] = alone
    with runtime_context.get_parallel().override(**first):
        parameters = list(parameters_of(config))
        pool = MHATokenToKVPool(
            NUM_TOKENS,
            page_size=1,
            dtype=config.dtype,
            head_num=config.get_num_kv_heads(tensor_parallel),
            head_dim=config.head_dim,
            layer_num=config.num_hidden_layers,
            device="cpu",
            enable_memory_saver=False,
        )
    return {
        "weights": sum(each.nbytes for each in parameters),
        "token": int(sum(pool.get_kv_size_bytes())) // (NUM_TOKENS + 1),
    }


def parameters_of(config: Any) -> Iterator[torch.nn.Parameter]:
    """Those of SGLang's model, tied ones once."""
    from sglang.srt.model_loader.utils import get_model_architecture

    kind, _ = get_model_architecture(config)
    torch.set_default_dtype(config.dtype)
    with torch.device("meta"):
        return iter(kind(config=config.hf_config).parameters())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    models = [Path(each) for each in sys.argv[1:] if not each.isdigit()]
    for model in models:
        for number in (int(each) for each in sys.argv[1:] if each.isdigit()):
            print(json.dumps([str(model), number, sizes_of(model, number)]), flush=True)  # noqa: T201
