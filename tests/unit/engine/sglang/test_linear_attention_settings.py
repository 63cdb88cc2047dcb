"""What engines of models that attend linearly are told, and what they are refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig, NetworkConfig
from penstock.errors import ConfigError
from services.launch.checks.model_fit import require_fits_model
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings
from services.rollout.engine.sglang_plugin.variables import LINEAR_ATTENTION_VARIABLE
from services.trainer.checks.model_type import require_trained_type
from tests.support.trainer.families import LINEAR_FAMILIES

FULL, LINEAR = "full_attention", "linear_attention"


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model folder with nothing but its configuration."""
    describe(tmp_path)
    return tmp_path


def describe(folder: Path, **text: Any) -> None:
    """Write a configuration with these settings of the language model."""
    config = {"model_type": "qwen3_5_text", "max_position_embeddings": 4096, **text}
    (folder / "config.json").write_text(json.dumps(config))


def args_of(config: RolloutConfig, model_path: Path, *, cuda: bool = False) -> dict[str, Any]:
    return settings.server_args(
        config, NetworkConfig(), model_path, float32_head=False, bootstrap_port=23_456, cuda=cuda
    )


def told(model_path: Path, *, cuda: bool = False) -> dict[str, Any]:
    """What SGLang reads in place of config.json's values."""
    overrides: dict[str, Any] = json.loads(args_of(RolloutConfig(), model_path, cuda=cuda)["json_model_override_args"])
    return overrides


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("text", "interval", "rotary_factor"),
    [
        ({}, 4, 0.25),
        ({"layer_types": [LINEAR, FULL] * 2}, 2, 0.25),
        ({"layer_types": [LINEAR, LINEAR, FULL, LINEAR]}, 3, 0.25),
        ({"full_attention_interval": 3, "partial_rotary_factor": 0.5}, 3, 0.5),
        ({"layer_types": [FULL] * 2, "full_attention_interval": 1}, 1, 0.25),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}, 4, 0.5),
    ],
    ids=str,
)
def test_sglang_is_told_what_transformers_writes_otherwise(
    model_path: Path, text: dict[str, Any], interval: int, rotary_factor: float, *, cuda: bool
) -> None:
    """It dies without the interval, and would take its own defaults for the rest."""
    describe(model_path, **text)
    expected = {
        "full_attention_interval": interval,
        "partial_rotary_factor": rotary_factor,
    }
    assert told(model_path, cuda=cuda) == expected
    (model_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "max_position_embeddings": 4096, "text_config": text, "vision_config": {}})
    )
    assert told(model_path, cuda=cuda) == {
        "text_config": expected,
        "vision_config": {"deepstack_visual_indexes": []},
    }


@pytest.mark.parametrize("kind", LINEAR_FAMILIES)
def test_transformers_has_the_layers_that_sglang_is_told(model_path: Path, kind: str) -> None:
    """And so has a model that says nothing of its layers, by the default of both."""
    config = LINEAR_FAMILIES[kind]().config.to_dict()
    text = config.get("text_config", config)
    (model_path / "config.json").write_text(json.dumps(config, default=str))
    given = told(model_path)
    interval = given.get("text_config", given)["full_attention_interval"]
    expected = [LINEAR if number % interval else FULL for number in range(1, len(text["layer_types"]) + 1)]
    assert text["layer_types"] == expected
    del text["layer_types"]
    (model_path / "config.json").write_text(json.dumps(config, default=str))
    assert told(model_path) == given


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": [LINEAR, FULL, FULL, LINEAR]},
        {"layer_types": [FULL, LINEAR, LINEAR, FULL]},
        {"layer_types": [LINEAR] * 3},
        {"layer_types": [LINEAR, FULL] * 2, "full_attention_interval": 4},
    ],
    ids=str,
)
def test_layers_that_sglang_would_take_for_others_are_refused(model_path: Path, text: dict[str, Any]) -> None:
    """It reads the interval alone."""
    describe(model_path, **text)
    with pytest.raises(ConfigError, match=r"model\.path: layer_types of config\.json has full attention in layers \["):
        args_of(RolloutConfig(), model_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ({"output_gate_type": "sigmoid"}, r"model\.path: output_gate_type = 'sigmoid' of config\.json"),
        ({"attn_output_gate": False}, r"model\.path: attn_output_gate = false of config\.json"),
    ],
    ids=str,
)
def test_gates_that_transformers_does_not_compute_are_refused(
    model_path: Path, text: dict[str, Any], match: str
) -> None:
    """SGLang reads them from config.json, so engines would compute another model than the trainer."""
    describe(model_path, **text)
    with pytest.raises(ConfigError, match=match):
        args_of(RolloutConfig(), model_path)
    with pytest.raises(ConfigError, match=match):
        require_trained_type(model_path)
    describe(model_path, output_gate_type="swish", attn_output_gate=True)
    args_of(RolloutConfig(), model_path)
    require_trained_type(model_path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_parallel": 3},
        r"rollout\.tensor_parallel = 3 does not divide linear_num_key_heads = 16 of .* set it to a divisor of 16",
    ),
    (
        {"prefill": 1, "decode": 1},
        r"rollout\.prefill = 1 does not go with linear attention .* start unified engines with rollout\.replicas",
    ),
    (
        {"sglang": {"speculative_algorithm": "NEXTN"}},
        r"rollout\.sglang\.speculative_algorithm does not go with linear attention .* leave it",
    ),
    (
        {"sglang": {"json-model-override-args": "{}"}},
        r"rollout\.sglang\.json-model-override-args does not go with linear attention .* inst",
    ),
]


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("rollout", "refusal"),
    [*REFUSED, ({"role": "decode"}, r"rollout\.role = 'decode' does not go with linear attention .*")],
    ids=str,
)
def test_engines_refuse_what_linear_attention_does_not_go_with(
    model_path: Path, rollout: dict[str, Any], refusal: str, *, cuda: bool
) -> None:
    """Also one that is started alone; other models are not concerned."""
    with pytest.raises(ConfigError, match=refusal):
        args_of(RolloutConfig(**rollout), model_path, cuda=cuda)
    describe(model_path, model_type="qwen3")
    assert args_of(RolloutConfig(**rollout), model_path, cuda=True)["model_path"] == str(model_path)


@pytest.mark.parametrize(("rollout", "refusal"), REFUSED, ids=str)
def test_a_run_refuses_them_before_anything_starts(model_path: Path, rollout: dict[str, Any], refusal: str) -> None:
    """With the setting, its value and the remedy."""
    recipe = Recipe(model=ModelConfig(path=model_path), rollout=RolloutConfig(**rollout))
    with pytest.raises(ConfigError, match=refusal):
        require_fits_model(recipe, model_path)
    require_fits_model(recipe, model_path, is_sft=True)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(
    ("heads", "refusal"),
    [
        ((6, 12, 6), r"tensor_parallel = 4 does not divide linear_num_key_heads = 6 of .* to a divisor of 6"),
        ((4, 6, 8), r"tensor_parallel = 4 does not divide linear_num_value_heads = 6 of .* to a divisor of 2"),
        ((4, 8, 6), r"tensor_parallel = 4 does not divide num_attention_heads = 6 of .* to a divisor of 2"),
        ((4, 8, 12), None),
    ],
    ids=str,
)
def test_processes_divide_heads_of_linear_attention(
    model_path: Path, heads: tuple[int, int, int], refusal: str | None, *, cuda: bool
) -> None:
    """Those of keys and of values, and queries' in other layers, in models with a tower too: SGLang would cut through
    heads, or pad them."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "num_attention_heads")
    text = {"num_key_value_heads": 4, **dict(zip(names, heads, strict=True))}
    for config in ({"model_type": "qwen3_5_text", **text}, {"model_type": "qwen3_5", "text_config": text}):
        (model_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
        with nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
            assert args_of(RolloutConfig(tensor_parallel=4), model_path, cuda=cuda)["tp_size"] == 4


def test_an_engine_on_a_cpu_has_states_for_its_requests(model_path: Path) -> None:
    """SGLang would take them from the memory of the machine. A recipe may want others."""
    assert args_of(RolloutConfig(max_running=8), model_path)["max_mamba_cache_size"] == 32
    wanted = RolloutConfig(sglang={"max_mamba_cache_size": 100})
    assert args_of(wanted, model_path)["max_mamba_cache_size"] == 100
    assert "max_mamba_cache_size" not in args_of(RolloutConfig(), model_path, cuda=True)
    describe(model_path, model_type="qwen3")
    assert "max_mamba_cache_size" not in args_of(RolloutConfig(), model_path)


@pytest.mark.parametrize(("cuda", "by_default"), [(False, "float32"), (True, "bfloat16")])
def test_windows_have_the_precision_of_the_engine(by_default: str, *, cuda: bool) -> None:
    """SGLang would round what a convolution sees to bfloat16."""
    for dtype, expected in (("auto", by_default), ("float32", "float32")):
        config = RolloutConfig(dtype=dtype)
        given = settings.environment(config, NetworkConfig(), group_timeout_s=30.0, cuda=cuda, is_linear=True)
        assert given["SGLANG_MAMBA_CONV_DTYPE"] == expected
        assert given[LINEAR_ATTENTION_VARIABLE]
    others = settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=30.0, cuda=cuda)
    assert not others[LINEAR_ATTENTION_VARIABLE]
    assert given.get("SGLANG_EXTERNAL_MODEL_PACKAGE") != others.get("SGLANG_EXTERNAL_MODEL_PACKAGE") or cuda
