"""What is sampled for training is the distribution whose logprobs engines and trainer compute."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig, NetworkConfig, SamplingConfig
from penstock.errors import ConfigError
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings


@pytest.mark.parametrize(
    ("cut", "message"), [({"top_p": 0.9}, r"sampling\.top_p = 0\.9"), ({"top_k": 20}, r"sampling\.top_k = 20")]
)
def test_a_cut_distribution_is_refused_before_training_starts(
    tiny_model_path: Path, cut: dict[str, float], message: str
) -> None:
    """Logprobs are from before the cut: they would not be those with which tokens were drawn."""
    recipe = Recipe(model=ModelConfig(path=tiny_model_path), sampling=SamplingConfig(**cut))
    with pytest.raises(ConfigError, match=message):
        for_trainer(recipe)


@pytest.mark.parametrize("cuda", [False, True])
def test_engines_return_tempered_logprobs_whatever_they_inherit(cuda: bool) -> None:
    """SGLang reads this variable; set to 1 by somebody's shell, it would return untempered ones."""
    environment = settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=30.0, cuda=cuda)
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
