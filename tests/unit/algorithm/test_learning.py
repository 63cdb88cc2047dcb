"""Every preset learns: a toy policy, sampled by an engine that is one version behind, comes to know the answers."""

import numpy as np
import pytest
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.loss import policy_loss
from services.trainer.algorithm.presets import PRESETS
from services.trainer.algorithm.statistics import batch_statistics
from services.trainer.algorithm.tokens import Samples, Tokens

NUM_PROMPTS, NUM_SAMPLES, LENGTH, VOCABULARY, NUM_STEPS = 8, 8, 3, 5, 60


def logits_of(theta: torch.Tensor) -> torch.Tensor:
    """[prompt, place, token]: a policy of free logits, each token independent of those before it."""
    return theta.log_softmax(-1)


def train(config: AlgorithmConfig, *, sign: float = 1.0) -> list[float]:
    """Mean reward of each step; a sample's reward is the share of its tokens that are the prompt's answer."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(NUM_PROMPTS, LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
    answers_PT = torch.randint(VOCABULARY, (NUM_PROMPTS, LENGTH), generator=generator)
    optimizer = torch.optim.Adam([theta], lr=0.1)
    behaviour, rewards = theta.detach().clone(), []
    group_G = np.repeat(np.arange(NUM_PROMPTS), NUM_SAMPLES)
    num_tokens_G = np.full(len(group_G), LENGTH)
    places = torch.arange(LENGTH)
    for version in range(NUM_STEPS):
        engine = logits_of(behaviour)[group_G]
        tokens_GT = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=generator).view(-1, LENGTH)
        rewards_G = (tokens_GT == answers_PT[group_G]).double().mean(1)
        rewards.append(float(rewards_G.mean()))
        advantages_G = sample_advantages(sign * rewards_G.numpy(), group_G, num_tokens_G, config.advantage)
        samples = Samples(
            advantages_G=torch.from_numpy(advantages_G),
            weights_G=torch.from_numpy(token_weights(num_tokens_G, group_G, config.aggregation)),
            eligible_G=torch.ones(len(group_G), dtype=torch.bool),
            version=version,
        )
        rows = torch.arange(len(group_G))[:, None]
        tokens = Tokens(
            logprobs_N=logits_of(theta)[group_G][rows, places, tokens_GT].flatten(),
            engine_logprobs_N=engine[rows, places, tokens_GT].flatten(),
            versions_N=torch.full((len(group_G) * LENGTH,), max(0, version - 1)),
            sample_N=torch.arange(len(group_G)).repeat_interleave(LENGTH),
        )
        behaviour = theta.detach().clone()  # the engine has the weights of before this step
        optimizer.zero_grad()
        statistics = batch_statistics(tokens.detached(), samples, config)
        policy_loss(tokens, samples, config, statistics=statistics).value.backward()
        optimizer.step()
    return rewards


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_learns(preset: str) -> None:
    """From one right token in five to most; with the rewards turned round, away from them.

    gspo is the slowest: its narrow clip stops most samples that are a version old.
    """
    config = AlgorithmConfig.model_validate({"preset": preset})
    rewards = train(config)
    assert np.mean(rewards[:3]) < 0.4
    assert np.mean(rewards[-3:]) > 0.6
    assert np.mean(train(config, sign=-1.0)[-3:]) < 0.1
