"""Model, data and settings, as `penstock doctor` judges them."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from services.doctor.finding import Status
from services.doctor.inputs import check_data, check_model, check_settings
from services.launch.settings.run_inputs import require_inputs
from services.trainer.backend.policy.adapters import add_adapters
from services.trainer.config import LoraConfig
from tests.support.doctor import assert_found, recipe
from tests.support.trainer.families import FAMILIES, write_model


def test_the_model(tmp_path: Path) -> None:
    """What of its folder is missing or damaged, and of which kind it is."""
    assert_found(check_model(recipe())[0], Status.FAULT, "section [model] is missing")
    finding, size = check_model(recipe("--model.path=builtin:tiny-qwen3-vl"))
    assert_found(finding, Status.OK, "qwen3_vl, 1.1 million parameters")
    assert size is not None
    assert size.num_trained == size.num_parameters == 1_104_320
    frozen = "--trainer.optimizer.learning_rates={tower = 0.0, merger = 0.0}"
    for setting, expected in ((frozen, range(1, 1_104_320)), ("--trainer.lora.rank=8", range(1))):
        _, other = check_model(recipe("--model.path=builtin:tiny-qwen3-vl", setting))
        assert other is not None
        assert other.num_trained in expected
    tiny = recipe("--model.path=builtin:tiny-qwen3-vl").model
    assert tiny is not None
    copy = recipe(f"--model.path={tmp_path}")
    assert_found(check_model(copy)[0], Status.FAULT, "no config.json", "give the folder of a transformers checkpoint")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_found(check_model(copy)[0], Status.FAULT, "no .safetensors file")
    weights = (tiny.path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    assert_found(check_model(copy)[0], Status.FAULT, "truncated or not a safetensors file")
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert_found(check_model(copy)[0], Status.FAULT, "no tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert_found(check_model(copy)[0], Status.FAULT, "llama, 1.1 million", "qwen3_vl")


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_moe"])
@pytest.mark.parametrize("targets", [("text",), ("tower", "q_proj"), ("merger", "o_proj")], ids=str)
def test_matrices_with_adapters_are_counted_by_name(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """As the trainer gives them adapters, without loading the model."""
    targets = targets if "vl" in kind else tuple(name for name in targets if name not in ("tower", "merger"))
    model = FAMILIES[kind]()
    path = write_model(model, tmp_path / kind)
    layers = add_adapters(model, LoraConfig(rank=8, targets=targets))
    _, size = check_model(
        recipe(f"--model.path={path}", "--trainer.lora.rank=8", f"--trainer.lora.targets={list(targets)}")
    )
    assert size is not None
    expected = sum(model.get_submodule(name).weight.numel() for name in layers)
    assert size.num_adapted == expected


@pytest.mark.parametrize(
    ("settings", "is_of_sft"),
    [
        (("--rollout.tensor_parallel=2", "--rollout.expert_parallel=2"), False),
        (("--trainer.router_replay=true",), False),
        (("--trainer.ranks=2", "--trainer.expert_parallel=2"), True),
        (("--trainer.ranks=8", "--trainer.sequence_parallel=8"), True),
        (("--trainer.optimizer.learning_rates={towr = 0.0}",), True),
        (("--trainer.optimizer.learning_rates={'*' = 0.0}",), True),
        (("--trainer.lora.rank=8", "--trainer.lora.targets=['q_prj']"), True),
    ],
    ids=str,
)
def test_settings_that_a_run_refuses_for_its_model_are_faults(settings: tuple[str, ...], is_of_sft: bool) -> None:
    """In the run's own words; with --sft, those of the trainer alone. Memory is estimated all the same."""
    given = recipe("--model.path=builtin:tiny-qwen3-vl", *settings)
    with pytest.raises(ConfigError) as refused:
        require_inputs(given)
    finding, size = check_model(given)
    assert_found(finding, Status.FAULT, str(refused.value))
    assert size is not None
    supervised, _ = check_model(given, is_sft=True)
    assert supervised.status is (Status.FAULT if is_of_sft else Status.OK)


def test_data_and_settings() -> None:
    """A file that is not there, and what a run would refuse."""
    assert_found(check_data(recipe()), Status.OK, "built-in")
    assert_found(check_data(recipe("--data.path=/no/such.parquet")), Status.FAULT, "/no/such.parquet", "no such file")
    assert_found(check_settings(recipe()), Status.OK)
    assert_found(check_settings(recipe("--sampling.top_p=0.9")), Status.FAULT, "sampling.top_p = 0.9", "set 1")
    unknown = recipe("--rollout.sglang.chunked_prefil_size=1")
    assert_found(check_settings(unknown), Status.FAULT, "chunked_prefil_size", "did you mean chunked_prefill_size?")
    assert_found(check_settings(recipe("--security.tls_ca=/no/ca.pem")), Status.FAULT, "/no/ca.pem")
    assert_found(check_settings(recipe("--data.profile=mth")), Status.FAULT, "data.profile = 'mth'", "mean 'math'?")
    assert_found(check_settings(recipe("--data.profile=mth"), is_sft=True), Status.OK)


def test_what_supervised_training_refuses() -> None:
    """The command's own check of the settings, and only what it reads: neither sampling nor SGLang."""
    assert_found(check_settings(recipe("--sampling.top_p=0.9"), is_sft=True), Status.OK)
    bounded = recipe("--data.max_prompt_tokens=10")
    assert_found(check_settings(bounded), Status.OK)
    assert_found(check_settings(bounded, is_sft=True), Status.FAULT, "max_prompt_tokens = 10", "sft.max_tokens")
    hint = check_settings(recipe("--sft.batch_size=64"))
    assert_found(hint, Status.OK, "give --sft if `penstock sft` is to run")


def test_evaluation_sets_that_only_penstock_eval_plays() -> None:
    """A missing file of theirs is a warning, and a fault where the run itself reads it."""
    away = "--evaluation.sets.test.path=/no/such.parquet"
    assert_found(check_data(recipe(away)), Status.WARNING, "only for `penstock eval`", "no such file")
    assert_found(check_data(recipe(away, "--evaluation.every=5")), Status.FAULT, "no such file")
    assert_found(check_data(recipe(away, "--sft.validate_every=5")), Status.WARNING, "no such file")
    assert_found(check_data(recipe(away, "--sft.validate_every=5"), is_sft=True), Status.FAULT, "no such file")
