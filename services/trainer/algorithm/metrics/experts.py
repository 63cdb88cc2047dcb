"""Metrics of a mixture's routers: how evenly tokens are spread over experts.

Legend: L = layers with experts, E = experts of a layer.
"""

import torch


def expert_stats(counts_LE: torch.Tensor) -> dict[str, float]:
    """Return the metrics by name.

    - `max_vio_mean`, `max_vio_max`: mean and maximum over layers of MaxVio, the load of the busiest expert above the
      mean, as a share of the mean. 0 is even; E / K - 1 is the most if each token has K experts (Wang et al. 2024,
      "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts").
    - `unused_expert_fraction`: share of experts, over all layers, that no token chose.

    Args:
        counts_LE: Tokens that chose each expert; at least one in each layer.
    """
    mean_L = counts_LE.double().mean(dim=1)
    vio_L = counts_LE.amax(dim=1) / mean_L - 1
    return {
        "max_vio_mean": float(vio_L.mean()),
        "max_vio_max": float(vio_L.max()),
        "unused_expert_fraction": float((counts_LE == 0).double().mean()),
    }
