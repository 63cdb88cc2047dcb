"""Compares a recipe's settings with the files of its model before any process starts; loads nothing.

The processes would refuse the settings themselves, but only once the model is loaded.
"""

from pathlib import Path

from penstock.model.families.experts import num_experts
from penstock.model.families.linear_attention import has_linear_attention
from penstock.model.folder import attention_heads, read_json
from penstock.model.parameters import own_parameter_sizes
from services.recipe import Recipe
from services.rollout.engine.expert_parallel import require_whole_experts
from services.rollout.engine.linear_attention import require_servable
from services.trainer.checks.adapters import require_adaptable
from services.trainer.checks.compiled import require_compilable
from services.trainer.checks.expert_parallel import require_divisible
from services.trainer.checks.model_type import require_trained_type
from services.trainer.checks.parameter_patterns import require_fitting
from services.trainer.checks.router_replay import require_mixture
from services.trainer.checks.sequence_parallel import require_shareable


def require_fits_model(recipe: Recipe, path: Path, *, is_sft: bool = False) -> None:
    """Check the settings that depend on the model.

    Args:
        recipe: The recipe.
        path: Folder of its model. Without safetensors files, patterns of parameters are not checked.
        is_sft: Whether `penstock sft` will run, which has no engines.

    Raises:
        ConfigError: a setting does not fit, the model's type is not trained, or a file of the model is damaged.
    """
    trainer = recipe.trainer
    count = num_experts(path)
    require_trained_type(path)
    is_linear = has_linear_attention(path)
    if not is_sft:
        require_servable(recipe.rollout, read_json(path / "config.json"))
        require_adaptable(trainer.lora, attends_linearly=is_linear)
        require_mixture(trainer.router_replay, num_experts=count)
        require_whole_experts(recipe.rollout.expert_parallel, num_experts=count)
    require_divisible(trainer.expert_parallel, num_ranks=trainer.ranks, num_experts=count)
    heads, kv_heads = attention_heads(path)
    require_shareable(
        trainer.sequence_parallel,
        num_ranks=trainer.ranks,
        num_heads=heads,
        num_kv_heads=kv_heads,
        attends_linearly=is_linear,
    )
    require_compilable(trainer.compile, is_mixture=count > 0, attends_linearly=is_linear)
    if names := list(own_parameter_sizes(path)):
        require_fitting(names, lora=trainer.lora, optimizer=trainer.optimizer)
