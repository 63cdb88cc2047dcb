"""The published objectives, one function each, in plain loops over Python floats.

Each returns the loss and its gradient by every log-probability, sample by sample. Nothing of services/ is used, and
nothing is shared between an objective and its neighbour but the advantages. Log ratios beyond +-20 are clamped, without
gradient, as in verl.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of the policy's own."""

    th: float
    """Log-probability under the policy."""
    mu: float
    """Of the engine."""
    ref: float
    """Of the reference."""
    version: int
    entropy: float


@dataclass(frozen=True, kw_only=True)
class PaperSample:
    """One response."""

    reward: float
    """NaN if it was not judged."""
    group: int
    tokens: Sequence[Token]


Samples = Sequence[PaperSample]
Result = tuple[float, list[list[float]]]


def ratio(log_ratio: float) -> tuple[float, float]:
    """exp, and its derivative."""
    if abs(log_ratio) > 20:
        return math.exp(math.copysign(20, log_ratio)), 0.0
    return math.exp(log_ratio), math.exp(log_ratio)


def compared(samples: Samples, of_group: Callable[[float, list[float]], float]) -> list[float]:
    """An advantage for each sample from its reward and those of its group; 0 where there is nothing to compare."""
    advantages = []
    for sample in samples:
        rewards = [s.reward for s in samples if s.group == sample.group and not math.isnan(s.reward)]
        has_spread = not math.isnan(sample.reward) and max(rewards) > min(rewards)
        advantages.append(of_group(sample.reward, rewards) if has_spread else 0.0)
    return advantages


def grpo(samples: Samples) -> list[float]:
    return compared(samples, lambda r, rs: (r - statistics.mean(rs)) / (statistics.stdev(rs) + 1e-6))


def dr_grpo(samples: Samples) -> list[float]:
    return compared(samples, lambda r, rs: r - statistics.mean(rs))


def rloo(samples: Samples) -> list[float]:
    """The reward minus the mean of the others."""
    return compared(samples, lambda r, rs: r - (sum(rs) - r) / (len(rs) - 1))


def maxrl(samples: Samples) -> list[float]:
    return compared(samples, lambda r, rs: (r - statistics.mean(rs)) / statistics.mean(rs))


def whitened(samples: Samples, values: list[float], *, keeps_zero_groups: bool) -> list[float]:
    """Values of samples, minus mean and divided by standard deviation over the tokens of all judged samples."""
    spread = [v for s, v in zip(samples, values, strict=True) if not math.isnan(s.reward) for _ in s.tokens]
    mean, variance = statistics.mean(spread), statistics.variance(spread)
    found = []
    for sample, value in zip(samples, values, strict=True):
        group = [v for s, v in zip(samples, values, strict=True) if s.group == sample.group]
        is_zero = math.isnan(sample.reward) or (keeps_zero_groups and not any(group))
        found.append(0.0 if is_zero else (value - mean) / math.sqrt(variance + 1e-8))
    return found


def reinforce_pp(samples: Samples) -> list[float]:
    rewards = [0.0 if math.isnan(s.reward) else s.reward for s in samples]
    return whitened(samples, rewards, keeps_zero_groups=False)


def reinforce_pp_baseline(samples: Samples) -> list[float]:
    return whitened(samples, dr_grpo(samples), keeps_zero_groups=True)


def total(samples: Samples) -> int:
    return sum(len(s.tokens) for s in samples)


def each(samples: Samples, of_token: Callable[[int, Token], tuple[float, float]]) -> Result:
    """Sum a loss over tokens; `of_token` gives it and its derivative for a token of sample number i."""
    loss, gradient = 0.0, []
    for i, sample in enumerate(samples):
        pairs = [of_token(i, token) for token in sample.tokens]
        loss += sum(value for value, _ in pairs)
        gradient.append([derivative for _, derivative in pairs])
    return loss, gradient


def ppo_term(log_ratio: float, a: float, low: float, high: float, dual: float = math.inf) -> tuple[float, float]:
    """min(r A, clip(r) A), for A < 0 at least dual A; and its derivative."""
    r, slope = ratio(log_ratio)
    clipped = min(max(r, 1 - low), 1 + high)
    if a < 0 and r > dual:
        return dual * a, 0.0
    if r * a <= clipped * a:
        return r * a, slope * a
    return clipped * a, 0.0


def tis(samples: Samples, cap: float = 2.0) -> Result:
    """-1/N sum min(pi/mu, C) A grad log pi."""
    a, n = grpo(samples), total(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        w = min(ratio(t.th - t.mu)[0], cap)
        return -w * a[i] / n, -w * a[i] / n

    return each(samples, of_token)


def ppo(samples: Samples, low: float = 0.2, high: float = 0.2, dual: float = math.inf) -> Result:
    a, n = grpo(samples), total(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        value, slope = ppo_term(t.th - t.mu, a[i], low, high, dual)
        return -value / n, -slope / n

    return each(samples, of_token)


def dapo(samples: Samples) -> Result:
    return ppo(samples, 0.2, 0.28)


def decoupled_ppo(samples: Samples, version: int) -> Result:
    """AReaL with the log-linear proximal policy: w clip(pi/prox) with w = prox/mu, tokens with w > 5 dropped."""
    a, n = whitened(samples, grpo(samples), keeps_zero_groups=True), total(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        alpha = (version - 1 - t.version) / (version - t.version) if version > t.version else 0.0
        prox = t.mu + alpha * (t.th - t.mu)
        w = ratio(prox - t.mu)[0]
        value, slope = ppo_term(t.th - prox, a[i], 0.4, 0.4)
        return (-w * value / n, -w * slope / n) if w <= 5 else (0.0, 0.0)

    return each(samples, of_token)


def dppo(samples: Samples, *, low: float = 0.2, high: float = 0.2, kl_max: float = 0.0, cap: float = 0.0) -> Result:
    """prime-rl: r A where the trust region keeps the token, plus 1e-3 (log r)^2 on all; or verl's binary KL."""
    a, n = dr_grpo(samples), total(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        p, q = math.exp(t.th), math.exp(t.mu)
        keep = not ((a[i] > 0 and p - q > high) or (a[i] < 0 and p - q < -low))
        if kl_max:
            other_p, other_q = max(1 - p, 1e-8), max(1 - q, 1e-8)
            kl = q * math.log(max(q, 1e-8) / max(p, 1e-8)) + other_q * math.log(other_q / other_p)
            keep = not (kl > kl_max and (p - q) * a[i] > 0)
        r, slope = ratio(t.th - t.mu)
        value, slope = r * a[i], slope * a[i]
        if cap:
            value, slope = min(r, cap) * a[i] * t.th, min(r, cap) * a[i]
        drift = t.th - t.mu
        return (-keep * value + 1e-3 * drift**2) / n, (-keep * slope + 2e-3 * drift) / n

    return each(samples, of_token)


def gspo(samples: Samples) -> Result:
    """1/G sum_i min(s A, clip(s) A) with s = (pi/mu)^(1/T); its gradient is s A / T by each log-probability."""
    a, loss, gradient = grpo(samples), 0.0, []
    for i, sample in enumerate(samples):
        length = len(sample.tokens)
        mean = sum(t.th - t.mu for t in sample.tokens) / length
        value, slope = ppo_term(mean, a[i], 3e-4, 4e-4)
        loss -= value / len(samples)
        gradient.append([-slope / length / len(samples)] * length)
    return loss, gradient


def cispo(samples: Samples, *, low: float = 0.0, high: float = 5.0) -> Result:
    """ScaleRL: sg(min(max(r, low), high)) A log pi, a mean over the tokens of each prompt, then over prompts."""
    centred = dr_grpo(samples)
    std = math.sqrt(
        statistics.variance(v for s, v in zip(samples, centred, strict=True) if not math.isnan(s.reward)) + 1e-8
    )
    a = [value / std for value in centred]
    groups = {s.group for s in samples}
    tokens = {g: sum(len(s.tokens) for s in samples if s.group == g) for g in groups}

    def of_token(i: int, t: Token) -> tuple[float, float]:
        r = min(max(ratio(t.th - t.mu)[0], low), high)
        weight = r * a[i] / tokens[samples[i].group] / len(groups)
        return -weight * t.th, -weight

    return each(samples, of_token)


def icepop(samples: Samples) -> Result:
    a, n = grpo(samples), total(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        w = ratio(t.th - t.mu)[0]
        w = w if 0.5 <= w <= 5 else 0.0
        return -w * a[i] / n, -w * a[i] / n

    return each(samples, of_token)


def m2po(samples: Samples) -> Result:
    """Algorithm 1: of the trust-region tokens (A > 0 and r > 1, or A < 0 and r < 1), mask the one of largest (log r)^2
    until the mean of the rest is at most 0.04.
    """
    a, n = grpo(samples), total(samples)
    places = [(i, j) for i, s in enumerate(samples) for j in range(len(s.tokens))]
    region = [(i, j) for i, j in places if (samples[i].tokens[j].th - samples[i].tokens[j].mu) * a[i] > 0]
    region.sort(key=lambda place: _m2(samples, place))
    masked = set()
    while region and statistics.mean(_m2(samples, place) for place in region) > 0.04:
        masked.add(region.pop())
    loss, gradient = 0.0, [[0.0] * len(s.tokens) for s in samples]
    for i, j in places:
        if (i, j) in masked:
            continue
        r, slope = ratio(samples[i].tokens[j].th - samples[i].tokens[j].mu)
        loss -= r * a[i] / n
        gradient[i][j] = -slope * a[i] / n
    return loss, gradient


def _m2(samples: Samples, place: tuple[int, int]) -> float:
    token = samples[place[0]].tokens[place[1]]
    return (token.th - token.mu) ** 2


def slime_geo3k(samples: Samples) -> Result:
    """PPO against the trainer's own policy: on the only step of a version the plain policy gradient."""
    a = grpo(samples)

    def of_token(i: int, _t: Token) -> tuple[float, float]:
        share = -a[i] / len(samples[i].tokens) / len(samples)
        return share, share

    return each(samples, of_token)


def rlinf_geo3k(samples: Samples) -> Result:
    """The same with weights min(pi/mu, 2)."""
    a = grpo(samples)

    def of_token(i: int, t: Token) -> tuple[float, float]:
        share = -min(ratio(t.th - t.mu)[0], 2.0) * a[i] / len(samples[i].tokens) / len(samples)
        return share, share

    return each(samples, of_token)
