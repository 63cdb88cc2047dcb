"""Names of parameters: transformers', the checkpoint's and SGLang's are the same ones."""

import pytest

from penstock.model.families.qwen_vl import loaded_name, own_names, published_name


@pytest.mark.parametrize(
    ("name", "is_multimodal", "expected"),
    [
        ("model.layers.0.mlp.down_proj.weight", False, ["model.layers.0.mlp.down_proj.weight"]),
        ("model.norm.weight", True, ["model.language_model.norm.weight"]),
        ("lm_head.weight", True, ["lm_head.weight"]),
        (
            "model.layers.0.self_attn.qkv_proj.bias",
            False,
            [f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"],
        ),
        (
            "model.layers.3.mlp.gate_up_proj.weight",
            True,
            [f"model.language_model.layers.3.mlp.{part}_proj.weight" for part in ("gate", "up")],
        ),
        ("visual.blocks.1.attn.qkv_proj.weight", True, ["model.visual.blocks.1.attn.qkv.weight"]),
        (
            "visual.blocks.1.mlp.gate_up_proj.bias",
            True,
            [f"model.visual.blocks.1.mlp.{part}_proj.bias" for part in ("gate", "up")],
        ),
        (
            "model.layers.3.qkv_proj.weight",
            True,
            [f"model.language_model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"],
        ),
        *(
            (f"model.layers.13.{part}.weight", False, [f"model.layers.13.self_attn.{part}.weight"])
            for part in ("o_proj", "q_norm", "k_norm")
        ),
        (
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            False,
            [f"model.layers.0.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z")],
        ),
        (
            "model.layers.0.linear_attn.in_proj_ba.weight",
            True,
            [f"model.language_model.layers.0.linear_attn.in_proj_{part}.weight" for part in "ba"],
        ),
        ("model.layers.0.linear_attn.A_log", False, ["model.layers.0.linear_attn.A_log"]),
    ],
)
def test_sglangs_parameters_have_transformers_names(name: str, is_multimodal: bool, expected: list[str]) -> None:
    """Fused ones are several, in SGLang's order; the vision tower's attention is fused in both, and SGLang has that of
    Qwen3.5 in the layer itself."""
    assert list(own_names(name, is_multimodal=is_multimodal)) == expected


@pytest.mark.parametrize("model", ["qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_vl"])
def test_older_checkpoints_keep_their_names(model: str) -> None:
    """transformers 5 nests the two towers of these models; their checkpoints do not."""
    assert published_name("model.visual.merger.ln_q.weight", model) == "visual.merger.ln_q.weight"
    assert published_name("model.language_model.norm.weight", model) == "model.norm.weight"
    assert published_name("model.language_model.norm.weight", "qwen3_vl") == "model.language_model.norm.weight"
    for name in ("model.visual.merger.ln_q.weight", "model.language_model.norm.weight", "lm_head.weight"):
        assert loaded_name(published_name(name, model), model) == loaded_name(name, model) == name
