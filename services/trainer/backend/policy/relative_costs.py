"""What tokens, pairs of tokens and patches cost in a model, from the sizes of its parts."""

from typing import Any

from penstock.model.families.qwen_vl import part_of
from services.trainer.backend.policy.layer_kinds import num_attending_layers, state_flops
from services.trainer.batching.row_costs import RowCosts

_LAYERS = ".layers."
_EXPERTS = ".experts."


def relative_costs(model: Any) -> RowCosts:
    """Return the costs of a transformers model's rows, by its products: two operations for each parameter and token.

    Args:
        model: With whole parameters: not sharded yet.
    """
    text = model.config.get_text_config()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = sum(size for name, size in sizes.items() if part_of(name) == "text" and _LAYERS in name)
    if experts := sum(size for name, size in sizes.items() if _EXPERTS in name):
        layers -= experts - experts * int(text.num_experts_per_tok) // int(text.num_experts)
    layers += state_flops(text) / 2
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # Queries with keys, and what comes of that with values: four operations for each pair and dimension of the heads.
    of_pair = 2 * num_attending_layers(text) * text.num_attention_heads * head_dim
    tower = sum(size for name, size in sizes.items() if part_of(name) == "tower")
    return RowCosts(per_pair=of_pair / layers, per_patch=tower / layers)
