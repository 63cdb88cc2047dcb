"""What a recipe passes on to SGLang, and what it must not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig, NetworkConfig, dump, load
from penstock.errors import ConfigError
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang.recipe_settings import OWN_NAMES, known_names
from services.rollout.engine.sglang.settings import server_args

DEFAULTS = {"log_level", "mm_preprocess_cache_size_mb", "mm_processor_worker_num"}
"""Arguments that give way to a recipe."""


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """A model folder with nothing but its configuration."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    return tmp_path


def args_of(config: RolloutConfig, model_path: Path, *, cuda: bool) -> dict[str, Any]:
    return server_args(config, NetworkConfig(), model_path, float32_head=False, bootstrap_port=23_456, cuda=cuda)


def test_a_recipe_passes_settings_on(model_path: Path, tmp_path: Path) -> None:
    """From the file and the command line, in TOML's types; Penstock's defaults give way to them."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[rollout.sglang]\nchunked_prefill_size = 512\nlog_level = "info"\ncuda_graph_bs_decode = [1, 8]\n'
    )
    overrides = ["--rollout.sglang.attention_backend=fa3", "--rollout.sglang.enable_mixed_chunk=true"]
    rollout = load(Recipe, [recipe], overrides).rollout
    assert (
        args_of(rollout, model_path, cuda=True).items()
        >= {
            "chunked_prefill_size": 512,
            "log_level": "info",
            "cuda_graph_bs_decode": [1, 8],
            "attention_backend": "fa3",
            "enable_mixed_chunk": True,
        }.items()
    )


@pytest.mark.parametrize(
    "text", [{"num_key_value_heads": 2}, {"text_config": {"num_attention_heads": 2, "max_position_embeddings": 4096}}]
)
def test_heads_that_cannot_be_shared_on_a_cpu_are_refused(model_path: Path, text: dict[str, Any]) -> None:
    """SGLang would end while it loads them. On GPUs several processes hold the same."""
    (model_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **text}))
    config = RolloutConfig(tensor_parallel=4)
    assert args_of(config, model_path, cuda=True)["tp_size"] == 4
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel = 4: on a CPU the model's 2 heads"):
        args_of(config, model_path, cuda=False)
    assert args_of(RolloutConfig(tensor_parallel=2), model_path, cuda=False)["tp_size"] == 2


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 16}}, "patches of 2 x 16 x 16; .* 2 x 14 x 14"),
        ({"model_type": "qwen2_vl", "vision_config": {}, "rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; .* 1e-06"),
        ({"model_type": "qwen2_vl", "vision_config": {}, "text_config": {}}, "rms_norm_eps is 1e-05"),
    ],
)
def test_a_tower_that_sglang_computes_otherwise_is_refused(
    model_path: Path, model: dict[str, Any], message: str, cuda: bool
) -> None:
    """Instead of an engine that dies at its first image, or has other log-probabilities than the trainer."""
    (model_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **model}))
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}"):
        args_of(RolloutConfig(), model_path, cuda=cuda)


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "qwen2_5_vl", "vision_config": {"spatial_patch_size": 14}, "rms_norm_eps": 1e-6},
        {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}, "text_config": {"rms_norm_eps": 1e-5}},
        {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}, "rms_norm_eps": 1e-6},
        {"model_type": "qwen2_vl", "vision_config": {"patch_size": 16}, "text_config": {"rms_norm_eps": 1e-6}},
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}, "text_config": {"rms_norm_eps": 1e-5}},
        {"model_type": "qwen2", "rms_norm_eps": 1e-5},
    ],
)
def test_other_towers_are_taken(model_path: Path, model: dict[str, Any]) -> None:
    """The published ones, whose files are older than transformers 5, and those of other families."""
    (model_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **model}))
    assert args_of(RolloutConfig(), model_path, cuda=True)["model_path"] == str(model_path)


def test_experts_are_divided_as_wholes_among_all_processes(model_path: Path) -> None:
    """Or not at all: SGLang could divide them among some, and each of them among the others."""
    for number in (1, 4):
        config = RolloutConfig(tensor_parallel=4, expert_parallel=number)
        assert args_of(config, model_path, cuda=True)["ep_size"] == number
    with pytest.raises(ValueError, match="expert_parallel = 2 is neither 1 nor tensor_parallel = 4"):
        RolloutConfig(tensor_parallel=4, expert_parallel=2)


def test_a_run_keeps_what_is_passed_on(tmp_path: Path) -> None:
    """The run's config.toml, from which it is resumed, reads back to the same."""
    passed = {"chunked_prefill_size": 512, "hicache_ratio": 2.5, "lora_target_modules": ["q_proj"], "json": {"a": [1]}}
    written = tmp_path / "config.toml"
    written.write_text(dump(Recipe(rollout=RolloutConfig(sglang=passed))))
    assert load(Recipe, [written]).rollout.sglang == passed


@pytest.mark.parametrize("name", sorted(OWN_NAMES))
def test_what_penstock_sets_is_refused(name: str) -> None:
    """With the setting to use instead, and before anything starts."""
    with pytest.raises(
        ConfigError, match=rf"^rollout\.sglang: {name} is set by Penstock: {re.escape(OWN_NAMES[name])}"
    ):
        load(Recipe, [], [f"--rollout.sglang.{name}=1"])


def test_the_setting_to_use_instead_exists() -> None:
    """A remedy that names a setting names one that there is."""
    recipe = Recipe(model=ModelConfig(path=Path("/model")))
    for name, instead in OWN_NAMES.items():
        for section, setting in re.findall(r"\b(model|rollout|trainer|network)\.(\w+)", instead):
            assert setting in type(getattr(recipe, section)).model_fields, name


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_nothing_that_is_passed_on_is_dropped(model_path: Path, role: str, *, cuda: bool) -> None:
    """An argument that an engine has anyway is refused above, or gives way, or is said to be needed on a CPU."""
    sizes = {"context_length": 64, "max_total_tokens": 64, "tensor_parallel": 2 if cuda else 1}
    ours = args_of(RolloutConfig(role=role, **sizes), model_path, cuda=cuda).keys() - OWN_NAMES
    assert DEFAULTS & ours == (DEFAULTS if not cuda else {"log_level"})
    for name in DEFAULTS:
        assert args_of(RolloutConfig(role=role, sglang={name: 7}), model_path, cuda=cuda)[name] == 7
    assert bool(ours - DEFAULTS) == (not cuda)
    for name in ours - DEFAULTS:
        with pytest.raises(
            ConfigError, match=rf"rollout\.sglang\.{name} = 7: an engine on a CPU needs .*; leave it out"
        ):
            args_of(RolloutConfig(role=role, sglang={name: 7}), model_path, cuda=cuda)


def test_a_name_that_sglang_does_not_know_is_refused(model_path: Path) -> None:
    """Before a run starts, with the name that was probably meant; also spelt as on SGLang's command line."""

    def check(name: str) -> None:
        rollout = RolloutConfig(sglang={name: 1})
        service_settings.for_engine(Recipe(model=ModelConfig(path=model_path), rollout=rollout))

    check("chunked_prefill_size")
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.chunked_prefil_size: SGLang has no such setting; did you"):
        check("chunked_prefil_size")
    with pytest.raises(ConfigError, match=r"chunked-prefill-size: .*did you mean chunked_prefill_size\?"):
        check("chunked-prefill-size")
    with pytest.raises(ConfigError, match=r"qqqq: SGLang has no such setting; `python -m sglang.launch_server --help`"):
        check("qqqq")
    with pytest.raises(ConfigError, match=r"tp-size is set by Penstock: use rollout\.tensor_parallel"):
        load(Recipe, [], ["--rollout.sglang.tp-size=2"])


def test_what_penstock_sets_sglang_knows() -> None:
    """No name is left over from another version of SGLang."""
    assert OWN_NAMES.keys() - known_names() == set()


def test_experts_keep_their_layout_on_gpus(model_path: Path) -> None:
    """Unless a recipe wants otherwise: what SGLang repacks when it loads takes no push."""
    for model_type, chosen in (("qwen3_vl_moe", "triton"), ("qwen3_vl", None)):
        (model_path / "config.json").write_text(f'{{"max_position_embeddings": 4096, "model_type": "{model_type}"}}')
        assert args_of(RolloutConfig(), model_path, cuda=True).get("moe_runner_backend") == chosen
    (model_path / "config.json").write_text('{"max_position_embeddings": 4096, "model_type": "qwen3_moe"}')
    wanted = RolloutConfig(sglang={"moe_runner_backend": "deep_gemm"})
    assert args_of(wanted, model_path, cuda=True)["moe_runner_backend"] == "deep_gemm"


@pytest.mark.parametrize(("cuda", "dtype"), [(True, "bfloat16"), (False, "float32")])
@pytest.mark.parametrize("checkpoint", [{"dtype": "float32"}, {"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {}])
def test_engines_compute_in_the_trainers_precision(
    model_path: Path, checkpoint: dict[str, str], dtype: str, *, cuda: bool
) -> None:
    """By default, whatever the checkpoint's precision and size, since a push is not cast. What a person sets stays."""
    (model_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **checkpoint}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [500_000_000], "data_offsets": [0, 0]}}).encode()
    (model_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert args_of(RolloutConfig(), model_path, cuda=cuda)["dtype"] == dtype
    assert args_of(RolloutConfig(dtype="float16"), model_path, cuda=cuda)["dtype"] == "float16"
