"""A Qwen3-VL with random weights, in Qwen3-VL-2B's shape or tiny."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models import tiny_qwen3_vl as tiny

TEXT_2B: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
    },
}  # fmt: skip
VISION_2B: Mapping[str, Any] = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip


def write_model(
    folder: Path, *, is_tiny: bool, device: torch.device, shape: Mapping[str, Mapping[str, Any]] | None = None
) -> torch.nn.Module:
    """Write a model made on `device`, with tokenizer and processor, and return it.

    `shape` has other values for `text_config` and `vision_config`, as a checkpoint's config.json names them.
    """
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = tiny.build_tokenizer()
    config = tiny.build_config(tokenizer)
    if is_tiny:
        model = tiny.build_model(config, seed=0)
    else:
        for part, values in (("text_config", TEXT_2B), ("vision_config", VISION_2B)):
            given = (shape or {}).get(part, {})
            for name, value in values.items():
                setattr(getattr(config, part), name, given.get(name, value))
        with device:
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = Qwen3VLForConditionalGeneration(config)
            finally:
                torch.set_default_dtype(torch.float32)
    tiny.save_model(model, tiny.build_processor(tokenizer), folder)
    return model
