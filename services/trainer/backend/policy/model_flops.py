"""Floating-point operations of a model's products, from the sizes of its parts and what its rows multiply.

A multiplication and an addition are two operations. This counts products with matrices, of queries with keys, and of
attention weights with values. In linear attention it counts those of a state with keys, values and queries, token by
token, which is how the rule is defined; in chunks it takes more. It leaves out norms, biases, activations, rotations,
the loss, padding, what is computed again for the backward pass, and the merging of adapters, which does not depend on
the number of tokens.

A backward pass multiplies once more for the gradient of a product's inputs, where this part of the model or one before
it is trained, and once more for the gradient of a trained matrix. The first layer whose weights are trained counts the
gradient of its inputs too, as usual in "6 operations for each parameter and token" (Kaplan et al. 2020, "Scaling Laws
for Neural Language Models", section 2.1).
"""

from dataclasses import dataclass
from typing import Any

from penstock.model.families.qwen_vl import part_of
from penstock.weights.adapter_names import is_adapter
from services.trainer.backend.policy.layer_kinds import num_attending_layers, state_flops
from services.trainer.batching.product_counts import ProductCounts

_MULTIPLIED = {"tower": (".blocks.", ".patch_embed."), "merger": ("merger",), "text": (".layers.",)}
"""What names of a part's matrices contain, in the order of the parts; its others are tables to look up. The head is
counted by itself, because it may be the embedding."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFlops:
    """Operations of one forward or backward pass, per token, pair and patch (see `ProductCounts`)."""

    token: float
    pair: float
    own_token: float
    patch: float
    patch_pair: float
    """For two patches of which one attends to the other, in one layer of the tower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of a model's passes; `of` adds them up for given rows."""

    forward: PassFlops
    backward: PassFlops
    tower_windows: tuple[int, ...]
    """For each layer of the tower, the patches along the side of a window that attends to itself; 0: the image does."""

    def of(self, counts: ProductCounts, *, num_forward: int = 1, with_gradient: bool) -> float:
        """Return the operations of passes over the same rows.

        Args:
            counts: What the rows multiply.
            num_forward: Forward passes.
            with_gradient: Whether a backward pass follows one of them.
        """
        flops = num_forward * self._of_pass(self.forward, counts)
        return flops + self._of_pass(self.backward, counts) if with_gradient else flops

    def _of_pass(self, each: PassFlops, counts: ProductCounts) -> float:
        flops = each.token * counts.tokens + each.pair * counts.pairs + each.own_token * counts.own_tokens
        for (frames, height, width), num_images in counts.grids.items():
            pairs = sum(_num_pairs(height, width, window) for window in self.tower_windows)
            flops += num_images * frames * (each.patch * height * width + each.patch_pair * pairs)
        return flops


def model_flops(model: Any) -> ModelFlops:
    """Return the operations of a transformers model, some of whose parameters may be frozen or adapters.

    Args:
        model: With whole parameters: not sharded yet.
    """
    text: Any = model.config.get_text_config()
    vision: Any = getattr(model.config, "vision_config", None)
    parameters = dict(model.named_parameters())
    passes_gradient = _parts_with_gradient(
        {part_of(name) for name, parameter in parameters.items() if parameter.requires_grad}
    )
    forward, backward = dict.fromkeys(_MULTIPLIED, 0.0), dict.fromkeys(_MULTIPLIED, 0.0)
    for name, parameter in parameters.items():
        part = part_of(name)
        if parameter.ndim < 2 or not any(each in name for each in _MULTIPLIED.get(part, ())):
            continue
        flops = 2.0 * parameter.numel()
        if _EXPERTS in name:
            flops *= text.num_experts_per_tok / text.num_experts
        if part == "merger":
            flops /= vision.spatial_merge_size**2
        if is_adapter(name):  # what it adds to the output is in the merged matrix
            backward[part] += 2 * flops * parameter.requires_grad
        else:
            forward[part] += flops
            backward[part] += flops * ((part in passes_gradient) + parameter.requires_grad)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair = 4.0 * num_attending_layers(text) * text.num_attention_heads * head_dim
    forward["text"] += (of_states := state_flops(text))
    backward["text"] += 2 * of_states * ("text" in passes_gradient)
    head = model.get_output_embeddings().weight
    tower = None if vision is None else model.base_model.visual
    patch_pair = 0.0 if tower is None else 4.0 * tower.patch_embed.proj.weight.shape[0]
    return ModelFlops(
        forward=PassFlops(
            token=forward["text"],
            pair=pair,
            own_token=2.0 * head.numel(),
            patch=forward["tower"] + forward["merger"],
            patch_pair=patch_pair,
        ),
        backward=PassFlops(
            token=backward["text"],
            pair=2 * pair * ("text" in passes_gradient),
            own_token=2.0 * head.numel() * (1 + head.requires_grad),
            patch=backward["tower"] + backward["merger"],
            patch_pair=2 * patch_pair * ("tower" in passes_gradient),
        ),
        tower_windows=() if tower is None else _windows(tower, vision),
    )


def _parts_with_gradient(trained: set[str]) -> set[str]:
    """Return the parts through which gradients pass: from the first that is trained on."""
    order = list(_MULTIPLIED)
    return {part for number, part in enumerate(order) if not trained.isdisjoint(order[: number + 1])}


def _windows(tower: Any, vision: Any) -> tuple[int, ...]:
    """Return `ModelFlops.tower_windows`."""
    if not hasattr(tower, "window_size"):
        return (0,) * len(tower.blocks)
    merged = vision.spatial_merge_size
    side = tower.window_size // merged // tower.patch_size * merged
    return tuple(0 if layer in vision.fullatt_block_indexes else side for layer in range(len(tower.blocks)))


def _num_pairs(height: int, width: int, window: int) -> int:
    """Return how many pairs of patches attend to each other in an image; see `ModelFlops.tower_windows`."""
    return _sum_of_squares(height, window or height) * _sum_of_squares(width, window or width)


def _sum_of_squares(length: int, part: int) -> int:
    """Return the sum of the squared lengths of the parts of a side, the last of which may be shorter."""
    return length // part * part**2 + (length % part) ** 2
