"""Every preset and every axis against an independent plain implementation of its formula (tests/support)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.aggregation import token_weights
from services.trainer.algorithm.axes import AdvantageConfig, AggregationConfig, EntropyConfig, KlConfig
from services.trainer.algorithm.regularisers import EntropyCoefficient, kl_penalty
from tests.support.trainer import papers
from tests.support.trainer.paper_checks import SEEDS, TOLERANCE, check, computed, plain
from tests.support.trainer.papers import PaperSample, Token
from tests.support.trainer.token_batches import VERSION, algorithm, random_batch

PRESETS: dict[str, Callable[[papers.Samples], papers.Result]] = {
    "tis": papers.tis,
    "ppo": papers.ppo,
    "decoupled_ppo": lambda samples: papers.decoupled_ppo(samples, VERSION),
    "dppo": papers.dppo,
    "gspo": papers.gspo,
    "cispo": papers.cispo,
    "icepop": papers.icepop,
    "m2po": papers.m2po,
    "dapo": papers.dapo,
    "slime_geo3k": papers.slime_geo3k,
    "rlinf_geo3k": papers.rlinf_geo3k,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_its_authors_published(preset: str, seed: int) -> None:
    """On random tokens, some off by a factor of e^40; in groups without spread, of one sample, with one unjudged."""
    batch = random_batch(seed)
    expected = PRESETS[preset](plain(batch))
    assert any(derivative for sample in expected[1] for derivative in sample)
    check(computed(batch, algorithm(preset)), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"])
def test_an_advantage_is_what_its_authors_published(kind: str, seed: int) -> None:
    """Of random rewards."""
    batch = random_batch(seed)
    config = AdvantageConfig.model_validate({"kind": kind})
    found = sample_advantages(batch.rewards_G, batch.group_G, batch.num_tokens_G, config)
    assert found == pytest.approx(getattr(papers, kind)(plain(batch)), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_other_than_the_presets(seed: int) -> None:
    """Dual clip of DAPO's bounds; CISPO with verl's; DPPO with unequal bounds, by binary KL, and with a cap."""
    batch = random_batch(seed, spread=1.0)
    samples = plain(batch)
    check(computed(batch, algorithm("dapo", trust_region={"dual": 3.0})), papers.ppo(samples, 0.2, 0.28, 3.0))
    narrow = algorithm("cispo", trust_region={"ratio_low": 0.8, "ratio_high": 1.2})
    check(computed(batch, narrow), papers.cispo(samples, low=0.8, high=1.2))
    unequal = algorithm("dppo", trust_region={"tv_low": 0.02, "tv_high": 0.05})
    check(computed(batch, unequal), papers.dppo(samples, low=0.02, high=0.05))
    by_kl = algorithm("dppo", trust_region={"kind": "dppo_kl", "kl_max": 0.05})
    check(computed(batch, by_kl), papers.dppo(samples, kl_max=0.05))
    capped = algorithm("dppo", trust_region={"cap": 1.5})
    check(computed(batch, capped), papers.dppo(samples, cap=1.5))


def raw_weights(sample: PaperSample, level: str) -> list[float]:
    """Importance weights of a sample's tokens before any bound."""
    logs = [token.th - token.mu for token in sample.tokens]
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    if level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    return [papers.ratio(log)[0] for log in logs]


BOUNDS: dict[str, Callable[[float], float]] = {
    "truncate": lambda w: min(w, 1.5),
    "mask": lambda w: w if 0.7 <= w <= 1.5 else 0.0,
    "clip": lambda w: min(max(w, 0.7), 1.5),
}


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("veto", [False, True])
def test_corrections(kind: str, level: str, normalize: bool, veto: bool) -> None:
    """verl's and slime's: each bound at each level, with a veto by single tokens, divided by the mean weight."""
    batch = random_batch(5)
    samples, advantages = plain(batch), papers.grpo(plain(batch))
    weights = [[BOUNDS[kind](w) for w in raw_weights(sample, level)] for sample in samples]
    if veto:
        for i, sample in enumerate(samples):
            if any(not 0.3 <= papers.ratio(token.th - token.mu)[0] <= 50 for token in sample.tokens):
                weights[i] = [0.0] * len(weights[i])
    mean = 1.0
    if normalize:
        judged = [w for sample, w in zip(samples, weights, strict=True) if not math.isnan(sample.reward)]
        counted = [w for sample in judged for w in (sample if level == "token" else sample[:1])]
        mean = sum(counted) / len(counted)
    total = papers.total(samples)
    gradient = [[-w / mean * advantages[i] / total for w in sample] for i, sample in enumerate(weights)]
    bounds: dict[str, Any] = {"kind": kind, "level": level, "high": 1.5, "normalize": normalize}
    bounds |= {} if kind == "truncate" else {"low": 0.7}
    bounds |= {"veto_low": 0.3, "veto_high": 50} if veto else {}
    found = computed(batch, algorithm("tis", correction=bounds))
    check(found, (sum(map(sum, gradient)), gradient))


REJECTIONS: dict[str, tuple[dict[str, float], Callable[[float, list[float]], bool]]] = {
    "opsm": ({"max_drop": 0.1}, lambda a, ds: a < 0 and -sum(ds) / len(ds) > 0.1),
    "geometric": ({"low": 0.8, "high": 1.1}, lambda _a, ds: not 0.8 <= papers.ratio(sum(ds) / len(ds))[0] <= 1.1),
    "k3": ({"max_k3": 0.05}, lambda _a, ds: sum(papers.ratio(d)[0] - 1 - d for d in ds) / len(ds) > 0.05),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejections_of_samples(kind: str, seed: int) -> None:
    """The gradient of PPO, without the samples that the rule rejects."""
    batch = random_batch(seed)
    samples = plain(batch)
    advantages = papers.grpo(samples)
    settings, rejects = REJECTIONS[kind]
    loss, gradient = papers.ppo(samples)
    for i, sample in enumerate(samples):
        if rejects(advantages[i], [token.th - token.mu for token in sample.tokens]):
            for token in sample.tokens:
                loss += papers.ppo_term(token.th - token.mu, advantages[i], 0.2, 0.2)[0] / papers.total(samples)
            gradient[i] = [0.0] * len(sample.tokens)
    check(computed(batch, algorithm("ppo", rejection={"kind": kind, **settings})), (loss, gradient))


def kl_term(kind: str, token: Token, *, unbiased: bool) -> tuple[float, float]:
    """A penalty and its derivative, by hand."""
    d = token.th - token.ref
    k3 = math.exp(-d) + d - 1
    value, slope = {"k2": (d * d / 2, d), "k3": (k3, 1 - math.exp(-d)), "k3_plus": (k3, d)}[kind]
    if not unbiased:
        return value, slope
    r = papers.ratio(token.th - token.mu)[0]
    return r * value, r * (d if kind == "k3" else slope)  # r (k3 + its slope) = r d


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_plus"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_drift_and_entropy_are_added(kind: str, unbiased: bool) -> None:
    """Each with its coefficient and the weights of the aggregation, on tokens without advantage too."""
    batch = random_batch(2)
    samples = plain(batch)
    loss, gradient = papers.tis(samples)
    total = papers.total(samples)
    for i, sample in enumerate(samples):
        for j, token in enumerate(sample.tokens):
            value, slope = kl_term(kind, token, unbiased=unbiased)
            drift = token.th - token.mu
            loss += (0.3 * value + 0.01 * drift**2 - 0.05 * token.entropy) / total
            gradient[i][j] += (0.3 * slope + 0.02 * drift) / total
    config = algorithm(
        kl={"kind": kind, "coef": 0.3, "unbiased": unbiased}, drift=0.01, entropy={"kind": "bonus", "coef": 0.05}
    )
    check(computed(batch, config, entropy_coef=0.05), (loss, gradient))


@pytest.mark.parametrize("unbiased", [False, True])
def test_k3_pulls_towards_the_reference_however_far_it_is(unbiased: bool) -> None:
    """d = -19 to -900 in float32: minimising raises the log-probability, more the further, and all stays finite."""
    reference = torch.zeros(5)
    logprobs = torch.tensor([-19.0, -21.0, -39.0, -100.0, -900.0], requires_grad=True)
    config = KlConfig(kind="k3", unbiased=unbiased)
    kl_penalty(logprobs, reference, logprobs.detach(), config).sum().backward()
    slopes = logprobs.grad.tolist()
    assert bool(torch.isfinite(logprobs.grad.square()).all())
    assert all(slope < 0 for slope in slopes)
    if not unbiased:
        assert slopes[:3] == pytest.approx([1 - math.exp(19), 1 - math.exp(21), 1 - math.exp(39)], rel=1e-5)
        assert slopes[3] == slopes[4] == pytest.approx(1 - math.exp(40), rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_pays_its_distance_to_the_reference_token_by_token(seed: int) -> None:
    """Returns from each token on, whitened over the tokens of judged samples; then PPO."""
    batch = random_batch(seed)
    samples = plain(batch)
    returns = [
        [sample.reward - 0.1 * sum(t.th - t.ref for t in sample.tokens[j:]) for j in range(len(sample.tokens))]
        for sample in samples
    ]
    judged = np.array([value for sample in returns for value in sample if not math.isnan(value)])
    mean, std = judged.mean(), math.sqrt(judged.var(ddof=1) + 1e-8)
    loss, gradient, total = 0.0, [], papers.total(samples)
    for sample, values in zip(samples, returns, strict=True):
        terms = [
            papers.ppo_term(token.th - token.mu, 0.0 if math.isnan(value) else (value - mean) / std, 0.2, 0.2)
            for token, value in zip(sample.tokens, values, strict=True)
        ]
        loss -= sum(value for value, _ in terms) / total
        gradient.append([-slope / total for _, slope in terms])
    config = algorithm("ppo", advantage={"kind": "reinforce_pp"}, kl={"kind": "k1_in_reward", "coef": 0.1})
    check(computed(batch, config), (loss, gradient))


def soft_overlong(num_tokens: int) -> float:
    """DAPO's eq. 13 with a maximum of 6 tokens and a buffer of 4, times 0.7: what is taken from a reward."""
    if num_tokens <= 2:
        return 0.0
    return 0.7 if num_tokens > 6 else 0.7 * (num_tokens - 2) / 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["dr_grpo", "rloo"])
@pytest.mark.parametrize("penalty", ["soft_overlong", "linear"])
def test_length_penalties_of_random_rewards(penalty: str, kind: str, seed: int) -> None:
    """An estimator with a penalty is the same estimator of rewards from which the penalty was taken before."""
    batch = random_batch(seed)
    settings: dict[str, Any] = {"kind": penalty}
    settings |= {"max_tokens": 6, "buffer_tokens": 4, "overlong_factor": 0.7} if penalty == "soft_overlong" else {}
    config = AdvantageConfig.model_validate({"kind": kind, "length_penalty": settings})
    samples = plain(batch)
    paid = []
    for sample in samples:
        peers = [each for each in samples if each.group == sample.group and not math.isnan(each.reward)]
        longest = max(len(each.tokens) for each in peers)
        mean = sum(each.reward for each in peers) / len(peers)
        share = 0.25 * max(mean, 0.0) * len(sample.tokens) / longest
        taken = soft_overlong(len(sample.tokens)) if penalty == "soft_overlong" else share
        paid.append(PaperSample(reward=sample.reward - taken, group=sample.group, tokens=sample.tokens))
    found = sample_advantages(batch.rewards_G, batch.group_G, batch.num_tokens_G, config)
    assert any(soft_overlong(len(sample.tokens)) for sample in samples)
    assert found == pytest.approx(getattr(papers, kind)(paid), **TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_constant_divisor_is_dr_grpos(seed: int) -> None:
    """Liu et al. 2025, "Understanding R1-Zero-Like Training": sums of tokens over a length, the mean over samples."""
    batch = random_batch(seed)
    samples = plain(batch)
    advantages = papers.dr_grpo(samples)
    loss, gradient = 0.0, []
    for sample, advantage in zip(samples, advantages, strict=True):
        terms = [papers.ppo_term(token.th - token.mu, advantage, 0.2, 0.2) for token in sample.tokens]
        loss -= sum(value for value, _ in terms) / 9 / len(samples)
        gradient.append([-slope / 9 / len(samples) for _, slope in terms])
    config = algorithm("ppo", advantage={"kind": "dr_grpo"}, aggregation={"kind": "constant", "length": 9})
    check(computed(batch, config), (loss, gradient))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_entropy_target_is_skyworks(seed: int) -> None:
    """Skywork-OR1, section 3.2.5: the coefficient moves by the adjustment, and acts at or below the target only."""
    config = EntropyConfig(kind="target", coef=0.01, target=0.5, adjustment=0.004)
    found, coefficient, acts = EntropyCoefficient(config), 0.01, True
    for entropy in np.random.default_rng(seed).uniform(0.0, 1.0, 50):
        assert found.value == pytest.approx(coefficient if acts else 0.0, **TOLERANCE)
        found.observe(float(entropy))
        acts = bool(entropy <= 0.5)
        coefficient = max(0.0, coefficient + (0.004 if entropy < 0.5 else -0.004))


def test_length_penalties() -> None:
    """DAPO's eq. 13 with 10 tokens and a buffer of 4; prime-rl's share of the group's mean reward."""
    rewards, groups, lengths = np.array([1.0, 1.0, 1.0, 0.0]), np.zeros(4, int), np.array([5, 8, 12, 6])
    overlong = {"kind": "soft_overlong", "max_tokens": 10, "buffer_tokens": 4, "overlong_factor": 2.0}
    config = AdvantageConfig.model_validate({"kind": "dr_grpo", "length_penalty": overlong})
    scored = np.array([1.0, 1.0 - 2 * 2 / 4, 1.0 - 2.0, 0.0])
    assert sample_advantages(rewards, groups, lengths, config) == pytest.approx(scored - scored.mean())
    config = AdvantageConfig.model_validate({"kind": "dr_grpo", "length_penalty": {"kind": "linear"}})
    scored = rewards - 0.25 * 0.75 * lengths / 12
    assert sample_advantages(rewards, groups, lengths, config) == pytest.approx(scored - scored.mean())


def test_a_negative_mean_reward_pays_nothing_for_length() -> None:
    """Rewards of -1 and 0 keep their distance: a long wrong answer is not better than a short one."""
    config = AdvantageConfig.model_validate({"kind": "dr_grpo", "length_penalty": {"kind": "linear"}})
    found = sample_advantages(np.array([-1.0, 0.0]), np.zeros(2, int), np.array([12, 5]), config)
    assert found.tolist() == [-0.5, 0.5]


def test_an_entropy_target_begins_with_the_recipes_coefficient() -> None:
    """Unless the checkpoint's was led to a target too."""
    bonus, target = EntropyConfig(kind="bonus", coef=0.5), EntropyConfig(kind="target", coef=0.01)
    resumed = EntropyCoefficient(target)
    resumed.load_state_dict(EntropyCoefficient(bonus).state_dict())
    assert resumed.value == 0.01
    led = EntropyCoefficient(target)
    led.observe(0.0)
    resumed.load_state_dict(led.state_dict())
    assert resumed.value == led.value > 0.01


def test_aggregations() -> None:
    """Each token's weight, by hand: samples of 1, 3 and 4 tokens, the first two of one group."""
    expected = {
        "token": [1 / 8, 1 / 8, 1 / 8],
        "sequence": [1 / 3, 1 / 9, 1 / 12],
        "prompt": [1 / 8, 1 / 8, 1 / 8],
        "constant": [1 / 30, 1 / 30, 1 / 30],
    }
    for kind, weights in expected.items():
        config = AggregationConfig.model_validate({"kind": kind, **({"length": 10} if kind == "constant" else {})})
        assert token_weights(np.array([1, 3, 4]), np.array([5, 5, 2]), config) == pytest.approx(weights)
    prompt = AggregationConfig(kind="prompt")
    assert token_weights(np.array([1, 3, 4]), np.array([5, 2, 2]), prompt) == pytest.approx([1 / 2, 1 / 14, 1 / 14])
