"""A person's own axes: examples/algorithm/own_axes.py against their papers, and what is said about wrong ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import load
from penstock.errors import ConfigError, DataError
from services.recipe import Recipe
from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.plugin import load_function, require_functions
from services.trainer.algorithm.tokens import Tokens
from tests.conftest import ROOT
from tests.support.trainer.token_batches import algorithm, random_batch

OPTIONS = {"low": 0.4, "high": 0.4}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples, and a module of mistakes."""
    (tmp_path / "mistakes.py").write_text(
        "A_NUMBER = 3\n"
        "def short(rewards_G, group_G, num_tokens_G):\n    return rewards_G[:1]\n"
        "def number(step):\n    return step.ratio_N\n"
        "def mean(step):\n    from services.trainer.algorithm.trust_region import Surrogate\n"
        "    none_N = step.ratio_N < 0\n"
        "    return Surrogate(objective_N=step.ratio_N.mean(), bounded_N=none_N, outside_N=none_N)\n"
    )
    monkeypatch.syspath_prepend(ROOT / "examples" / "algorithm")
    monkeypatch.syspath_prepend(tmp_path)
    load_function.cache_clear()


def with_gmpo(**axes: Any) -> AlgorithmConfig:
    """PPO with the example's trust region."""
    region = {"kind": "custom", "function": "own_axes:gmpo", "options": OPTIONS}
    return algorithm("ppo", trust_region=region, aggregation={"kind": "sequence"}, **axes)


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_is_the_papers(seed: int) -> None:
    """1/G sum A (prod of clipped ratios)^(1/T), and its gradient by finite differences."""
    batch = random_batch(seed, num_far=0)
    config = with_gmpo()
    given, samples = batch.tokens(batch.theta_HV).detached(), batch.samples(config)

    def paper(logprobs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sample, advantage in enumerate(samples.advantages_G):
            rows = given.sample_N == sample
            product = torch.ones((), dtype=torch.float64)
            for d in logprobs[rows] - given.engine_logprobs_N[rows]:
                ratio, clipped = d.exp(), d.clamp(-0.4, 0.4).exp()
                product = product * (torch.minimum(ratio, clipped) if advantage > 0 else torch.maximum(ratio, clipped))
            total = total - advantage * product ** (1 / int(rows.sum())) / len(samples.advantages_G)
        return total

    theirs = given.logprobs_N.clone().requires_grad_()
    expected = paper(theirs)
    expected.backward()
    mine = given.logprobs_N.clone().requires_grad_()
    loss = policy_loss(
        Tokens(
            logprobs_N=mine,
            engine_logprobs_N=given.engine_logprobs_N,
            versions_N=given.versions_N,
            sample_N=given.sample_N,
        ),
        samples,
        config,
    )
    loss.value.backward()
    torch.testing.assert_close(loss.value, expected)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert loss.region.outside_N.any()


def test_the_example_s_overlay_is_what_is_compared_here() -> None:
    """Its algorithm is that of `with_gmpo`, with OPO's baseline."""
    recipe = load(Recipe, [ROOT / "examples" / "algorithm" / "recipe.toml"], [])
    assert recipe.algorithm == with_gmpo(advantage={"kind": "custom", "function": "own_axes:opo"})


def test_opo_weighs_the_baseline_by_length() -> None:
    """Rewards 1, 0, 0 of 6, 1, 3 tokens: the baseline is 0.6. Options reach the function; unjudged samples do not."""
    config = AdvantageConfig(kind="custom", function="own_axes:opo")
    rewards = np.array([1, 0, 0, math.nan, 0.3, 0.3])
    groups, lengths = np.array([1, 1, 1, 1, 2, 2]), np.array([6, 1, 3, 9, 1, 2])
    assert sample_advantages(rewards, groups, lengths, config) == pytest.approx([0.4, -0.6, -0.6, 0, 0, 0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere:gmpo", r"trust_region\.function = 'nowhere:gmpo' cannot be imported: No module .* check PYTHONPATH"),
        ("own_axes:gspo", r"has no attribute 'gspo'"),
        ("mistakes:A_NUMBER", r"is a int, not a function; name one as module:function"),
    ],
)
def test_a_function_that_is_not_there_is_said_before_the_run(function: str, message: str) -> None:
    """When the backend is made, not in the first step."""
    config = algorithm("ppo", trust_region={"kind": "custom", "function": function})
    with pytest.raises(ConfigError, match=message):
        require_functions(config)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "own_axes:gmpo",
            {"low": 0.4, "hihg": 0.4},
            r"the options \['hihg', 'low'\]: .*mend algorithm\.trust_region\.opt",
        ),
        ("mistakes:number", OPTIONS, r"got an unexpected keyword argument 'low'"),
        ("mistakes:short", {}, r"cannot be called with step and the options \[\]: missing a required argument"),
    ],
)
def test_options_that_a_function_does_not_take_are_said_before_the_run(
    function: str, options: dict[str, float], message: str
) -> None:
    """With the function's own complaint, and which section to mend."""
    config = algorithm("ppo", trust_region={"kind": "custom", "function": function, "options": options})
    with pytest.raises(ConfigError, match=message):
        require_functions(config)


def test_a_function_that_returns_something_else_is_named() -> None:
    """By its setting and what it should return."""
    batch = random_batch(0)
    config = AdvantageConfig(kind="custom", function="mistakes:short")
    with pytest.raises(DataError, match=r"advantage\.function = 'mistakes:short' returned shape \(1,\) for 17 samples"):
        sample_advantages(batch.rewards_G, batch.group_G, batch.num_tokens_G, config)
    region = algorithm("ppo", trust_region={"kind": "custom", "function": "mistakes:number"})
    with pytest.raises(DataError, match=r"trust_region\.function = 'mistakes:number' returned a Tensor, not a Surr"):
        policy_loss(batch.tokens(batch.theta_HV), batch.samples(region), region)
    region = algorithm("ppo", trust_region={"kind": "custom", "function": "mistakes:mean"})
    with pytest.raises(DataError, match=r"returned objective_N of shape \(\) for \d+ tokens; it must return one value"):
        policy_loss(batch.tokens(batch.theta_HV), batch.samples(region), region)
