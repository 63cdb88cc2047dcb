"""The weights of a policy with adapters (LoRA): the adapters alone are trained, saved and copied."""

import torch

from penstock.weights.adapters import is_adapter
from services.trainer.backend.optimizer.master_weights import MasterWeights


class AdapterWeights(MasterWeights):
    """The adapters, in float32. The base is none of the master weights: it never changes."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take the adapters of a transformers model."""
        super().__init__(model)
        self._masters = {name: parameter for name, parameter in self._masters.items() if is_adapter(name)}
