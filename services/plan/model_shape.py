"""A model's shape from its config alone: the parameters of its parts, and smaller models with layers of its kinds."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import TRAINED_MODEL_TYPES
from penstock.model.folder import read_json, require_model
from services.plan.adapter_shape import AdapterShape
from services.plan.parameter_names import is_of_experts, layer_of
from services.trainer.backend.policy.layer_kinds import kinds_of_layers, num_attending_layers, num_linear_layers
from services.trainer.checks.adapters import require_adaptable
from services.trainer.checks.parameter_patterns import rates_of
from services.trainer.config import LoraConfig

NUM_BLOCKS = 4
"""Fewest blocks of a tower that is made smaller: three of them hand their features to the text's layers."""
NUM_LAYERS = 3
"""Fewest layers of a text model that is made smaller, for the same reason."""
_WITHOUT_ADAPTERS = LoraConfig()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """The properties of a model on which memory depends."""

    config: Any
    """transformers' config."""
    config_json: Mapping[str, Any]
    """The content of `config.json`."""
    num_parameters: int
    num_of_largest_layer: int
    """Parameters of the text's largest layer."""
    num_of_text_layers: int
    """Parameters of all text layers."""
    num_active: int
    """Parameters that compute a token; of the experts, only the chosen ones."""
    num_experts: int
    """Experts of a layer; 0 in a dense model."""
    num_of_layers_experts: int
    """Parameters of the experts of the text's largest layer."""
    sizes: tuple[tuple[str, int], ...]
    """Name and size of each parameter, without adapters."""
    adapters: AdapterShape | None
    """The adapters, which alone are trained; None: all parameters are."""

    @classmethod
    def read(cls, folder: Path, lora: LoraConfig = _WITHOUT_ADAPTERS) -> "ModelShape":
        """Read `config.json` of a model's folder; the weights need not be present.

        Args:
            folder: The folder.
            lora: The adapters that the trainer gives the model.

        Raises:
            ConfigError: there is no such file, it does not describe a model, the trainer does not support the model
                or adapters of it, or a pattern of the adapters fits no layer.
        """
        from transformers import AutoConfig

        require_model(folder)
        with _blaming(folder):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in TRAINED_MODEL_TYPES:
            raise ConfigError(
                f"model.path: models of type {config.model_type} cannot be trained; choose one of type "
                f"{', '.join(TRAINED_MODEL_TYPES)}"
            )
        text = config.get_text_config()
        require_adaptable(lora, attends_linearly=num_linear_layers(text) > 0)
        with _blaming(folder), torch.device("meta"):
            model = make_model(copy.deepcopy(config))
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        layers, in_experts = [0] * text.num_hidden_layers, [0] * text.num_hidden_layers
        for name, size in sizes.items():
            if (number := layer_of(name)) is not None:
                layers[number] += size
                in_experts[number] += size if is_of_experts(name) else 0
        experts = sum(in_experts)
        num_experts = int(text.num_experts) if experts else 0
        chosen = int(text.num_experts_per_tok) if experts else 0
        total = sum(sizes.values())
        return cls(
            config=config,
            config_json=read_json(folder / "config.json"),
            num_parameters=total,
            num_of_largest_layer=max(layers, default=0),
            num_of_text_layers=sum(layers),
            num_active=total - experts + experts * chosen // max(1, num_experts),
            num_experts=num_experts,
            num_of_layers_experts=max(zip(layers, in_experts, strict=True), default=(0, 0))[1],
            sizes=tuple(sizes.items()),
            adapters=AdapterShape.add(model, lora) if lora.rank else None,
        )

    @property
    def text(self) -> Any:
        """The text's part of the config."""
        return self.config.get_text_config()

    @property
    def vision(self) -> Any:
        """The tower's part of the config; None for a model without vision."""
        return getattr(self.config, "vision_config", None)

    @property
    def num_layers(self) -> int:
        """Layers of the text."""
        return int(self.text.num_hidden_layers)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer of the text, as transformers calls it."""
        return kinds_of_layers(self.text)

    @property
    def attends_linearly(self) -> bool:
        """Whether some layers have a state in place of attention to all earlier tokens."""
        return num_linear_layers(self.text) > 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the tower; 0 without one."""
        return 0 if self.vision is None else int(self.vision.depth)

    @property
    def kv_values(self) -> int:
        """Key and value numbers that one token leaves in a cache, over all layers that attend to earlier tokens."""
        text = self.text
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * num_attending_layers(text) * text.num_key_value_heads * head_dim)

    def require_divisible(self, tensor_parallel: int) -> None:
        """Check that an engine's GPUs can share the heads, as SGLang does.

        Raises:
            ConfigError: they cannot.
        """
        heads, kv_heads = int(self.text.num_attention_heads), int(self.text.num_key_value_heads)
        of_tower = 0 if self.vision is None else int(self.vision.num_heads)
        if (
            heads % tensor_parallel
            or of_tower % tensor_parallel
            or max(kv_heads, tensor_parallel) % min(kv_heads, tensor_parallel)
        ):
            raise ConfigError(
                f"rollout.tensor_parallel = {tensor_parallel} cannot share the model's {heads} heads, {kv_heads} of "
                f"keys and values{f', {of_tower} of the tower' if of_tower else ''}; choose a number that divides them"
            )

    def trained(self, learning_rates: Mapping[str, float]) -> frozenset[str]:
        """Return the names of what is trained, adapters if there are any, given rates by pattern as in a recipe.

        Raises:
            ConfigError: a pattern fits no parameter, or nothing is trained.
        """
        parameters = self.sizes if self.adapters is None else self.adapters.matrices
        rates = rates_of([name for name, _ in parameters], learning_rates, default=1.0)
        return frozenset(name for name, rate in rates.items() if rate > 0)

    def share_bytes(self, names: Set[str], num_bytes: int, *, ranks: int, expert_parallel: int) -> int:
        """Return the bytes that some parameters take on each of several ranks, or on one.

        Args:
            names: Names of the parameters, or of matrices of adapters.
            num_bytes: Of each number.
            ranks: All ranks. Each has an equal share, apart from experts, which are not cut.
            expert_parallel: Ranks that divide the experts of each layer.
        """
        experts = sum(size for name, size in self.sizes if name in names and is_of_experts(name))
        others = sum(size for name, size in self.sizes if name in names and not is_of_experts(name))
        of_rank = math.ceil(self.num_experts / expert_parallel / (ranks // expert_parallel))
        shares = num_bytes * others // ranks + num_bytes * experts * of_rank // max(1, self.num_experts)
        return shares if self.adapters is None else shares + num_bytes * self.adapters.num_of_rank(names, ranks=ranks)

    def smaller(self, layer_kinds: Sequence[str], *, num_blocks: int) -> Any:
        """Return the config of a model with fewer layers and blocks.

        Args:
            layer_kinds: Kinds of its layers, in order, from `layer_kinds`.
            num_blocks: Blocks of its tower.
        """
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = len(layer_kinds)
        if getattr(text, "layer_types", None):
            text.layer_types = list(layer_kinds)
        if self.vision is not None:
            vision = config.vision_config
            vision.depth = num_blocks
            for listed in ("deepstack_visual_indexes", "fullatt_block_indexes"):
                if indexes := getattr(vision, listed, None):
                    setattr(vision, listed, list(range(min(len(indexes), num_blocks))))
        return config


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a transformers model of the config, with uninitialised parameters."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class = AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText
    make: Callable[..., Any] = auto_class.from_config
    return make(config, dtype=dtype)


@contextmanager
def _blaming(folder: Path) -> Iterator[None]:
    """Raise anything that transformers raises on reading a config as the config's fault."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - transformers checks little, so an odd value may fail anywhere
        words = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path: {folder / 'config.json'} describes no model ({type(error).__name__}: {words}); copy it again"
        ) from None
