"""The sizes of a model's adapters (LoRA), and of the matrices that they change."""

import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Self

from penstock.weights.adapter_names import LORA_A, LORA_B
from services.plan.parameter_names import layer_of
from services.trainer.backend.policy.adapters import adapter_parameters, add_adapters
from services.trainer.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The properties of adapters on which memory depends."""

    rank: int
    matrices: tuple[tuple[str, tuple[int, int]], ...]
    """Name, rows and columns of each A and B."""

    @classmethod
    def add(cls, model: Any, lora: LoraConfig) -> Self:
        """Give a transformers model adapters, as the trainer does.

        Raises:
            ConfigError: a pattern fits no layer.
        """
        add_adapters(model, lora)
        matrices = [(name, matrix.shape) for name, matrix in adapter_parameters(model).items()]
        return cls(rank=lora.rank, matrices=tuple((name, (rows, columns)) for name, (rows, columns) in matrices))

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have an adapter."""
        return [name.removesuffix(LORA_A) for name, _ in self.matrices if name.endswith(LORA_A)]

    @property
    def names(self) -> frozenset[str]:
        """Names of all A and B."""
        return frozenset(name for name, _ in self.matrices)

    @property
    def scaled(self) -> frozenset[str]:
        """Names of all B, which a push carries multiplied by the scale."""
        return frozenset(name for name, _ in self.matrices if name.endswith(LORA_B))

    @property
    def num_parameters(self) -> int:
        """Parameters of all adapters."""
        return sum(rows * columns for _, (rows, columns) in self.matrices)

    @property
    def num_of_text_layers(self) -> int:
        """Parameters of the adapters of all text layers."""
        return self._of_text_layers().total()

    @property
    def num_of_largest_layer(self) -> int:
        """Parameters of the adapters of the text layer that has most."""
        return max(self._of_text_layers().values(), default=0)

    @property
    def changed_sizes(self) -> list[int]:
        """Parameters of each matrix that an adapter changes."""
        shapes = dict(self.matrices)
        return [shapes[layer + LORA_B][0] * shapes[layer + LORA_A][1] for layer in self.layers]

    def num_of_rank(self, names: Set[str], *, ranks: int) -> int:
        """Return the most parameters that a rank holds of some matrices, of which it has whole rows."""
        return sum(math.ceil(rows / ranks) * columns for name, (rows, columns) in self.matrices if name in names)

    def _of_text_layers(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for name, (rows, columns) in self.matrices:
            if (layer := layer_of(name)) is not None:
                found[layer] += rows * columns
        return found
