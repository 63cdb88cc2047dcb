"""A model's shape, from its config alone: the parameters of its parts, and smaller models with the same layers."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import part_of
from services.trainer.backend.learning_rates import rates_of
from services.trainer.config import TRAINED_MODEL_TYPES

NUM_BLOCKS = 4
"""Fewest blocks of a tower that is made smaller: there are three that hand their features to the text's layers."""
NUM_LAYERS = 3
"""Fewest layers of a text that is made smaller, for the same reason."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """What memory depends on."""

    config: Any
    """transformers' config."""
    num_parameters: int
    num_of_layer: int
    """Parameters of one of the text's layers, the largest."""
    num_of_text_layers: int
    """Parameters of all of them."""
    num_active: int
    """Parameters that compute a token: of experts, those that are chosen."""
    sizes: tuple[tuple[str, int], ...]
    """Each parameter and its size."""

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        """Read `config.json` of a model's folder; the weights need not be there.

        Raises:
            ConfigError: there is none, or the trainer does not take such a model.
        """
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from None
        if config.model_type not in TRAINED_MODEL_TYPES:
            raise ConfigError(
                f"model.path: models of type {config.model_type} cannot be trained; choose one of type "
                f"{', '.join(TRAINED_MODEL_TYPES)}"
            )
        with torch.device("meta"):
            model = make_model(copy.deepcopy(config))
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        text = config.get_text_config()
        layers = [0] * text.num_hidden_layers
        for name, size in sizes.items():
            if (number := _layer_of(name)) is not None:
                layers[number] += size
        experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
        num_experts = getattr(text, "num_experts", 0) or 1
        chosen = getattr(text, "num_experts_per_tok", 0) or 1
        total = sum(sizes.values())
        return cls(
            config=config,
            num_parameters=total,
            num_of_layer=max(layers),
            num_of_text_layers=sum(layers),
            num_active=total - experts + experts * chosen // num_experts,
            sizes=tuple(sizes.items()),
        )

    @property
    def text(self) -> Any:
        """The text's part of the config."""
        return self.config.get_text_config()

    @property
    def vision(self) -> Any:
        """The tower's part of the config; None for a model without eyes."""
        return getattr(self.config, "vision_config", None)

    @property
    def num_layers(self) -> int:
        """Layers of the text."""
        return int(self.text.num_hidden_layers)

    @property
    def num_blocks(self) -> int:
        """Blocks of the tower; 0 without one."""
        return 0 if self.vision is None else int(self.vision.depth)

    @property
    def kv_values(self) -> int:
        """Values of keys and values that one token leaves in a cache, over all layers."""
        text = self.text
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * self.num_layers * text.num_key_value_heads * head_dim)

    @property
    def dtype(self) -> str:
        """Precision of the checkpoint; bfloat16, as of all published ones, if the config does not say."""
        found = getattr(self.config, "dtype", None) or getattr(self.text, "dtype", None) or "bfloat16"
        return str(found).removeprefix("torch.")

    def num_trained(self, learning_rates: Mapping[str, float]) -> int:
        """Return how many parameters have a learning rate, given rates by pattern as in a recipe.

        Raises:
            ConfigError: a pattern fits no parameter, or nothing is trained.
        """
        rates = rates_of([name for name, _ in self.sizes], learning_rates, default=1.0)
        return sum(size for name, size in self.sizes if rates[name] > 0)

    def smaller(self, *, num_layers: int, num_blocks: int) -> Any:
        """Return the config of a model that has fewer layers and blocks of the same kind."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:num_layers]
        if self.vision is not None:
            vision = config.vision_config
            vision.depth = num_blocks
            for listed in ("deepstack_visual_indexes", "fullatt_block_indexes"):
                if indexes := getattr(vision, listed, None):
                    setattr(vision, listed, list(range(min(len(indexes), num_blocks))))
        return config


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model of the config, with parameters that nobody has set."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText
    make: Callable[..., Any] = auto_class.from_config
    return make(config, dtype=dtype)


def _layer_of(name: str) -> int | None:
    """The number of the text's layer that has the parameter."""
    if part_of(name) != "text" or ".layers." not in name:
        return None
    return int(name.split(".layers.")[1].split(".")[0])
