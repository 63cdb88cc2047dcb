"""`penstock serve --gpus`, by which a pod says how many GPUs it has."""

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.launch.checks.given_gpus import require_gpus
from services.recipe import Recipe
from tests.unit.cli.test_cli import assert_mistake, penstock


@pytest.mark.parametrize(
    ("service", "settings", "num_gpus", "words"),
    [
        ("rollout", (), 4, r"rollout\.tensor_parallel = 1 uses 1 GPUs, and this process has 4 .* to 4, or give it 1 "),
        ("rollout", ("--rollout.tensor_parallel=4",), 2, r"rollout\.tensor_parallel = 4 uses 4 GPUs, .* has 2 "),
        ("trainer", (), 8, r"trainer\.ranks = 1 uses 1 GPUs, and this process has 8 .*; set trainer\.ranks to 8, or "),
        ("trainer", ("--trainer.ranks=8",), 1, r"trainer\.ranks = 8 uses 8 GPUs, and this process has 1 "),
        ("trainer", ("--trainer.device=cpu",), 1, r"--gpus=1, and trainer\.device = 'cpu'; give it no GPU"),
        ("worker", (), 1, r"--gpus=1, and the worker computes on no GPU; give it no GPU"),
    ],
)
def test_another_number_than_the_settings_use_is_refused(
    service: str, settings: tuple[str, ...], num_gpus: int, words: str
) -> None:
    """Too many as too few: what is left over would be idle, and nothing would say so."""
    with pytest.raises(ConfigError, match=words):
        require_gpus(load(Recipe, [], settings), service, num_gpus=num_gpus)


def test_the_number_that_the_settings_use_is_taken() -> None:
    """By engines and trainer, each by its own setting."""
    recipe = load(Recipe, [], ("--rollout.tensor_parallel=2", "--trainer.ranks=4"))
    require_gpus(recipe, "rollout", num_gpus=2)
    require_gpus(recipe, "trainer", num_gpus=4)


@pytest.mark.parametrize("service", ["rollout", "trainer"])
def test_a_process_ends_with_2_before_it_loads_anything(service: str) -> None:
    """A Job of Kubernetes fails at once then; the model does not exist, and is not looked for."""
    ended = penstock("serve", service, "--gpus=4", "--model.path=/no/model")
    assert_mistake(ended, " = 1 uses 1 GPUs, and this process has 4 (--gpus)")
