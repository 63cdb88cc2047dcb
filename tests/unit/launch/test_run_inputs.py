"""What does not fit a whole run, or its model, is refused before anything starts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from services.launch.checks.known_names import require_names
from services.launch.settings import service_settings
from services.launch.settings.run_inputs import require_inputs
from services.recipe import Recipe
from tests.support.trainer.families import MIXTURES, write_model

OWN = {"kinds": ("x",), "chat_template_kwargs": {"add_vision_id": True}}
ADAPTERS = {"rank": 4, "targets": ["q_proj"]}


@pytest.mark.parametrize(
    ("changed", "section"),
    [
        ({"data": {"chat_template_kwargs": {"add_vision_ids": True}, "sources": {"a": {}, "b": OWN}}}, "data"),
        ({"data": {"sources": {"a": OWN, "b": {"chat_template_kwargs": {"add_vision_ids": 1}}}}}, "data.sources.b"),
        (
            {"evaluation": {"every": 5, "sets": {"t": {"chat_template_kwargs": {"add_vision_ids": 1}}}}},
            "evaluation.sets.t",
        ),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused_before_anything_starts(
    tiny_model_path: Path, changed: dict[str, Any], section: str
) -> None:
    """Whatever becomes of wrong rows, and where long prompts are played; the setting is named."""
    settings = {"model": {"path": tiny_model_path}, "filters": {"overlong_prompts": "keep"}, **changed}
    refusal = (
        rf"{section}\.chat_template_kwargs sets \['add_vision_ids'\], which .* does not read; it reads add_vision_id$"
    )
    for wrong_rows in ("refuse", "drop"):
        settings["data"] = {**settings.get("data", {}), "wrong_rows": wrong_rows}
        with pytest.raises(ConfigError, match=f"^{refusal}"):
            require_inputs(Recipe.model_validate(settings))
    require_inputs(Recipe.model_validate({**settings, "data": OWN, "evaluation": {}}))


@pytest.mark.parametrize(
    ("data", "known"),
    [
        ({"profile": "mine"}, {"reward": {"verifiers": {"mine": "mine.py:verify"}}}),
        ({"profile": "remote"}, {"reward": {"remote": {"url": "http://judge:8000"}}}),
        ({"profile": "mine"}, {"worker": {"reward_address": "judge:7002"}}),
        ({"environment": "mine"}, {"worker": {"environments": {"mine": "mine:Environment"}}}),
        ({"environment": "mine"}, {"worker": {"agents": {"mine": {"function": "mine:run"}}}}),
        ({"profile": "math", "sources": {"a": {"profile": "mine"}}}, {"reward": {"verifiers": {"mine": "mine.py:v"}}}),
    ],
)
def test_names_that_a_run_adds_are_known(data: dict[str, Any], known: dict[str, Any]) -> None:
    """Verifiers, the remote profile, environments and agents; any profile of a reward service elsewhere."""
    key = "environment" if "environment" in data else "profile"
    with pytest.raises(ConfigError, match=rf"^data\.(sources\.a\.)?{key} = '\w+' is unknown; "):
        require_names(Recipe.model_validate({"data": data}), sets=False)
    require_names(Recipe.model_validate({"data": data, **known}), sets=False)


def test_experts_that_ranks_cannot_divide_are_refused_before_anything_starts(tiny_model_path: Path) -> None:
    """The model is dense here."""
    settings = {"model": {"path": tiny_model_path}, "data": OWN, "trainer": {"ranks": 2, "expert_parallel": 2}}
    with pytest.raises(ConfigError, match=r"trainer\.expert_parallel = 2 is for mixtures of experts"):
        require_inputs(Recipe.model_validate(settings))


def test_a_family_that_is_not_trained_is_refused_before_anything_starts(tiny_model_path: Path, tmp_path: Path) -> None:
    """Engines may serve it."""
    recipe = recipe_of_type("qwen3_5_moe", tiny_model_path, tmp_path)
    refusal = r"models of type qwen3_5_moe cannot be trained; choose one of type .*qwen3_vl,"
    for build in (require_inputs, service_settings.for_sft):
        with pytest.raises(ConfigError, match=refusal):
            build(recipe)


@pytest.mark.parametrize(
    ("trainer", "refusal", "of_sft"),
    [
        (
            {"ranks": 2, "sequence_parallel": 2},
            r"trainer\.sequence_parallel = 2 does not go with linear attention",
            None,
        ),
        ({"compile": True}, r"trainer\.compile = true does not go with linear attention", None),
        (
            {"lora": ADAPTERS},
            r"trainer\.lora\.rank = 4 does not go with linear attention",
            r"trainer\.lora\.rank = 4: supervised training has no adapters yet; leave trainer\.lora",
        ),
    ],
    ids=str,
)
def test_what_linear_attention_does_not_go_with_is_refused_before_anything_starts(
    tiny_model_path: Path, tmp_path: Path, trainer: dict[str, Any], refusal: str, of_sft: str | None
) -> None:
    """Each with the setting to leave out."""
    recipe = recipe_of_type("qwen3_5", tiny_model_path, tmp_path, trainer=trainer)
    with pytest.raises(ConfigError, match=of_sft or refusal):
        service_settings.for_sft(recipe)
    with pytest.raises(ConfigError, match=refusal):
        require_inputs(recipe)


def recipe_of_type(model_type: str, tiny_model_path: Path, tmp_path: Path, **sections: Any) -> Recipe:
    """With a model that says it is of this type."""
    path = tmp_path / model_type
    shutil.copytree(tiny_model_path, path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"model": {"path": path}, "data": OWN, "filters": {"overlong_prompts": "keep"}}
    return Recipe.model_validate({**settings, **sections})


def test_rows_that_ranks_cannot_share_are_refused_before_anything_starts(tiny_model_path: Path) -> None:
    """The model has 4 attention heads."""
    settings = {"model": {"path": tiny_model_path}, "data": OWN, "trainer": {"ranks": 8, "sequence_parallel": 8}}
    with pytest.raises(ConfigError, match=r"trainer\.sequence_parallel = 8 cannot share the model's 4 attention heads"):
        require_inputs(Recipe.model_validate(settings))


@pytest.mark.parametrize(
    ("trainer", "refusal"),
    [
        ({"optimizer": {"learning_rates": {"towr": 0.0}}}, r"optimizer\.learning_rates: no parameter fits 'towr'"),
        ({"optimizer": {"learning_rates": {"head": 0.0}}}, "the head of this model is its embedding"),
        ({"optimizer": {"learning_rates": {"*": 0.0}}}, "every parameter has rate 0, so nothing is trained"),
        ({"lora": {**ADAPTERS, "targets": ["q_prj"]}}, r"lora\.targets: no linear layer fits 'q_prj'.* q_proj"),
        ({"lora": ADAPTERS, "optimizer": {"learning_rates": {"tower": 0.0}}}, "no parameter fits 'tower'"),
    ],
)
def test_patterns_that_fit_no_parameter_are_refused_before_anything_starts(
    tiny_model_path: Path, trainer: dict[str, Any], refusal: str
) -> None:
    """By the names in the model's files; with adapters, rates are those of their matrices."""
    settings = {"model": {"path": tiny_model_path}, "data": OWN, "trainer": trainer}
    with pytest.raises(ConfigError, match=refusal):
        require_inputs(Recipe.model_validate(settings))
    if "lora" not in trainer:
        with pytest.raises(ConfigError, match=refusal):
            service_settings.for_sft(Recipe.model_validate(settings))


def test_patterns_that_fit_are_accepted(tiny_model_path: Path) -> None:
    """Also a rate of one of an adapter's two matrices."""
    for trainer in (
        {"optimizer": {"learning_rates": {"tower": 0.0, "merger.*": 1e-6}}},
        {"lora": ADAPTERS, "optimizer": {"learning_rates": {"lora_B.weight": 1e-4}}},
    ):
        settings = {"model": {"path": tiny_model_path}, "data": OWN, "trainer": trainer}
        require_inputs(Recipe.model_validate(settings))


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_patterns_of_experts_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    """Whether its files have a matrix for each expert, or two tensors for all."""
    path = write_model(MIXTURES[kind](), tmp_path / kind)
    for pattern in ("*.experts.gate_up_proj", "*.experts.down_proj"):
        optimizer = {"learning_rates": {pattern: 0.0}}
        settings = {"model": {"path": path}, "data": OWN, "trainer": {"optimizer": optimizer}}
        require_inputs(Recipe.model_validate(settings))
    settings["trainer"] = {"optimizer": {"learning_rates": {"experts.0.gate_proj.weight": 0.0}}}
    with pytest.raises(ConfigError, match=r"no parameter fits 'experts\.0\.gate_proj\.weight'"):
        require_inputs(Recipe.model_validate(settings))


@pytest.mark.parametrize("check", [require_inputs, service_settings.for_sft])
def test_a_mixture_is_not_compiled(check: Any, tmp_path: Path) -> None:
    """It is refused before it is loaded."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    recipe = Recipe.model_validate({"model": {"path": tmp_path}, "trainer": {"compile": True}})
    with pytest.raises(ConfigError, match=r"trainer\.compile = true does not go with mixtures .*; leave it out"):
        check(recipe)
