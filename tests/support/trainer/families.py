"""A small model with random weights of each family that is trained, and its checkpoint as published.

No two sizes of an expert's matrices are equal: a transposed one would not be noticed.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.model.tokens import image_token_id
from tests.conftest import ROOT

CHECKPOINT = ROOT / "models" / "tiny-qwen3-vl"
"""For its tokenizer, image processor and shape."""
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}
VOCABULARY = 384


def random_qwen3_vl() -> Any:
    """With deepstack and a tied head."""
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(CHECKPOINT))


def random_qwen2_5_vl() -> Any:
    """With window attention in its tower: windows of 4 x 4 patches, and one layer that sees the whole image.

    As published, the middle of the tower's MLP is no multiple of 8, to which SGLang pads it, and patches have 14 x 14
    pixels: SGLang takes any others for features that a tower has already made. On CPUs SGLang also pads the middle of
    the language model's, to a multiple of 32.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    image_id = image_token_id(CHECKPOINT)
    sizes = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    text = {
        **sizes,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": VOCABULARY,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6,
    }
    vision = {
        **{"hidden_size": 32, "intermediate_size": 44, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14},
        **{"depth": 2, "window_size": 56, "fullatt_block_indexes": [1], "spatial_merge_size": 2},
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image_id, tie_word_embeddings=False
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def random_qwen2_vl() -> Any:
    """With full attention in its tower, and biases in the language model.

    The language model's epsilon is the published one, which SGLang takes for the tower's norms too.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    rest = {"num_hidden_layers": 3, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6}
    text = {**sizes, **rest, "rope_parameters": rope}
    vision = {
        **{"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **{"depth": 2, "patch_size": 14, "spatial_merge_size": 2, "in_chans": 3},
    }
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image_token_id(CHECKPOINT), tie_word_embeddings=False
    )
    return Qwen2VLForConditionalGeneration(config)


def random_qwen2() -> Any:
    """Text only, tied, with biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=3, vocab_size=VOCABULARY, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config)


def random_qwen3() -> Any:
    """Text only, untied, more query than key heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, head_dim=16, num_hidden_layers=3, vocab_size=VOCABULARY, tie_word_embeddings=False)
    return Qwen3ForCausalLM(config)


def random_qwen3_vl_moe(**text: Any) -> Any:
    """Untied and with deepstack at three layers as published, for which SGLang is written.

    `text` are settings of the language model.
    """
    from transformers import AutoConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    dense = AutoConfig.from_pretrained(CHECKPOINT).to_dict()
    parts = {name: dense[name] | {"model_type": None} for name in ("text_config", "vision_config")}
    for part in parts.values():
        del part["model_type"]
    parts["text_config"] |= {**EXPERTS, "mlp_only_layers": [], "tie_word_embeddings": False, **text}
    parts["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    tokens = {name: value for name, value in dense.items() if name.endswith("token_id")}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**parts, **tokens, tie_word_embeddings=False))


def random_qwen3_moe(**text: Any) -> Any:
    """Text only. Each layer is a mixture, as in every published one; SGLang knows no other."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"head_dim": 16, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **rest, **EXPERTS, **text}))


LINEAR = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"num_hidden_layers": 4, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "rms_norm_eps": 1e-4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
}
"""As published, three layers that attend linearly are followed by one that attends in full. The epsilon is larger: what
the rule reads can be almost zero, and the norm behind it would make rounding errors as large as values."""


def random_qwen3_5() -> Any:
    """Without deepstack. On CPUs SGLang loads no tower whose inner size is not a multiple of 32 for each process."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    dense = json.loads((CHECKPOINT / "config.json").read_text())
    tokens = {name: value for name, value in dense.items() if name.endswith("token_id")}
    vision = {
        **{"hidden_size": 32, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64, "depth": 2},
        "num_position_embeddings": 64,
    }
    config = Qwen3_5Config(text_config=LINEAR, vision_config=vision, **tokens, tie_word_embeddings=False)
    return remembering(Qwen3_5ForConditionalGeneration(config))


def random_qwen3_5_text() -> Any:
    """Text only."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return remembering(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**LINEAR)))


def remembering(model: Any) -> Any:
    """States of linear attention that last for some tokens, and norms that do more than nothing."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-4, 0, generator=generator)
        elif parameter.ndim == 1 and ("norm" in name or name.endswith("dt_bias")):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


MIXTURES: dict[str, Callable[..., Any]] = {"qwen3_vl_moe": random_qwen3_vl_moe, "qwen3_moe": random_qwen3_moe}
LINEAR_FAMILIES: dict[str, Callable[..., Any]] = {"qwen3_5": random_qwen3_5, "qwen3_5_text": random_qwen3_5_text}
"""Most of whose layers attend linearly."""
FULL_FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3_vl": random_qwen3_vl,
    "qwen2_5_vl": random_qwen2_5_vl,
    "qwen2_vl": random_qwen2_vl,
    "qwen3": random_qwen3,
    "qwen2": random_qwen2,
    **MIXTURES,
}
"""All of whose layers attend in full."""
FAMILIES: dict[str, Callable[..., Any]] = {**FULL_FAMILIES, **LINEAR_FAMILIES}
"""By model type."""


def heard(model: Any, *, std_of_embedding: float = 1.0) -> Any:
    """Weights at a scale where every layer, and every expert, is heard.

    Where the embedding is the head too, logits grow with its scale, and float32's rounding errors with them: engines
    agree with transformers to 1e-5 at 0.1, and not always at 0.3.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            fan_in = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
            std = std_of_embedding if "embed_tokens" in name else fan_in**-0.5
            parameter.data.normal_(std=std, generator=generator)
    return model


def heard_in_engines(kind: str) -> Any:
    """A model of the family, by model type, at a scale where engines agree with transformers to 1e-5.

    With linear attention a small embedding does the opposite: of 4,680 tokens, computed by chunks and one by one, the
    worst differed by 1.5e-5 at 0.1, and by 4.3e-6 at 1.
    """
    return heard(FAMILIES[kind](), std_of_embedding=1.0 if kind in LINEAR_FAMILIES else 0.1)


def published(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the checkpoint, as the files on the hub have them."""
    renamed = model.config.model_type in ("qwen2_vl", "qwen2_5_vl")
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if renamed:
            yield name.replace("model.visual.", "visual.").replace("model.language_model.", "model."), weight
        elif ".experts." not in name:
            yield name, weight
        elif model.config.model_type == "qwen3_vl_moe":
            yield name, torch.stack([matrix.T for matrix in weight])
        else:
            for expert, matrix in enumerate(weight):
                prefix = f"{name.rpartition('.')[0]}.{expert}"
                if name.endswith("down_proj"):
                    yield f"{prefix}.down_proj.weight", matrix
                else:
                    inner = EXPERTS["moe_intermediate_size"]
                    yield f"{prefix}.gate_proj.weight", matrix[:inner]
                    yield f"{prefix}.up_proj.weight", matrix[inner:]


def write_model(model: Any, folder: Path) -> Path:
    """Make a model folder with the tokenizer of the tiny model, and its image processor with the model's patches."""
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    tiny = json.loads((CHECKPOINT / "config.json").read_text())
    for part, of_tiny in ((config, tiny), (config.get("text_config", config), tiny["text_config"])):
        part.update({name: value for name, value in of_tiny.items() if name.endswith("token_id") and name in part})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    write_processors(model.config.model_type, folder)
    tensors = {name: tensor.contiguous().clone() for name, tensor in published(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_processors(model_type: str, folder: Path) -> Path:
    """Write the tiny model's image processors, with the patches and the processor of a family, into a folder."""
    own = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}.get(model_type)
    for path in CHECKPOINT.glob("*processor_config.json"):
        text = path.read_text()
        if own is not None:
            text = text.replace('"patch_size": 16', '"patch_size": 14').replace("Qwen3VLProcessor", own)
            text = text.replace("Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor")
        (folder / path.name).write_text(text)
    return folder
