"""The loss's inputs from an optimizer batch: flat vectors over tokens, and one value for each sample.

Legend: N = the policy's own tokens of a micro-batch, or of the whole batch, sample by sample; G = samples of the
optimizer batch.

Invariant: nothing here knows about rows, padding or sequences. Advantages belong to samples, and denominators count
tokens and samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The policy's own tokens."""

    logprobs_N: torch.Tensor
    """Current policy, with gradient."""
    engine_logprobs_N: torch.Tensor
    """Reported by the engine, at the same temperature."""
    versions_N: torch.Tensor
    """int64: policy version that sampled the token."""
    sample_N: torch.Tensor
    """int64: number of the token's sample in the optimizer batch."""
    entropy_N: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from, in nats, with gradient; None if nothing reads it."""
    reference_logprobs_N: torch.Tensor | None = None
    """Reference policy; None without one."""

    def of(self, chosen_N: torch.Tensor) -> "Tokens":
        """Return the tokens for which the mask holds."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Tokens(**{name: None if value is None else value[chosen_N] for name, value in values.items()})

    def detached(self) -> "Tokens":
        """Return a copy in float64 on the CPU, without gradient."""
        return Tokens(**{field.name: _detached(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The samples of the optimizer batch, and the version at which they are trained."""

    advantages_G: torch.Tensor
    """0 for a sample that teaches nothing. With `kl.kind = "k1_in_reward"` the reward: each token has an advantage."""
    weights_G: torch.Tensor
    """Weight in the loss of each token of the sample (`aggregation.token_weights`)."""
    eligible_G: torch.Tensor
    """bool: whether the sample has a reward and is not masked. Only these count in the batch's statistics."""
    version: int
    """The published version: the one of the weights before the step."""

    def detached(self) -> "Samples":
        """Return a copy in float64 on the CPU."""
        return Samples(
            advantages_G=_detached(self.advantages_G),
            weights_G=_detached(self.weights_G),
            eligible_G=_detached(self.eligible_G),
            version=self.version,
        )


def concatenated(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate the tokens of at least one micro-batch."""
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Tokens)}
    return Tokens(**{name: None if found[0] is None else torch.cat(found) for name, found in values.items()})


def sample_sums(values_N: torch.Tensor, sample_N: torch.Tensor) -> torch.Tensor:
    """Return float64[N]: for each token, the sum over the tokens of its sample.

    The order of tokens changes the sum only by float64 rounding. All tokens of a sample must be present.
    """
    _, number_N, count_G = sample_N.unique(return_inverse=True, return_counts=True)
    sums_G = torch.zeros(len(count_G), dtype=torch.float64, device=values_N.device)
    return sums_G.index_add_(0, number_N, values_N.double())[number_N]


def sample_means(values_N: torch.Tensor, sample_N: torch.Tensor) -> torch.Tensor:
    """Return float64[N]: for each token, the mean over the tokens of its sample, all of which must be present."""
    return sample_sums(values_N, sample_N) / sample_sums(torch.ones_like(values_N), sample_N)


def sample_any(mask_N: torch.Tensor, sample_N: torch.Tensor) -> torch.Tensor:
    """Return bool[N]: for each token, whether the mask holds for any token of its sample."""
    return sample_sums(mask_N, sample_N) > 0


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor
