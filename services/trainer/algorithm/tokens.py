"""What the loss sees of an optimizer batch: flat vectors over tokens, and one value for each sample.

Legend: N = the policy's own tokens of a micro-batch, or of the whole batch, sample by sample; G = samples of the
optimizer batch.

Invariant: nothing here knows rows, padding or sequences. Advantages belong to samples, and denominators count tokens
and samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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

    def detached(self) -> "Tokens":
        """Return a copy in float64 on the CPU, without gradient."""
        return Tokens(
            logprobs_N=self.logprobs_N.detach().cpu().double(),
            engine_logprobs_N=self.engine_logprobs_N.cpu().double(),
            versions_N=self.versions_N.cpu(),
            sample_N=self.sample_N.cpu(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The samples of the optimizer batch."""

    advantages_G: torch.Tensor
    weights_G: torch.Tensor
    """Weight in the loss of each token of the sample (`aggregation.token_weights`)."""

    def detached(self) -> "Samples":
        """Return a copy in float64 on the CPU."""
        return Samples(advantages_G=self.advantages_G.cpu().double(), weights_G=self.weights_G.cpu().double())


def concatenated(parts: Sequence[Tokens]) -> Tokens:
    """Return the tokens of all micro-batches as one."""
    return Tokens(
        logprobs_N=torch.cat([part.logprobs_N for part in parts]),
        engine_logprobs_N=torch.cat([part.engine_logprobs_N for part in parts]),
        versions_N=torch.cat([part.versions_N for part in parts]),
        sample_N=torch.cat([part.sample_N for part in parts]),
    )
