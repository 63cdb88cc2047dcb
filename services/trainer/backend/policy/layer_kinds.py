"""Which layers of a language model attend to all earlier tokens, and what the others, which have a state, multiply."""

from typing import Any

FULL = "full_attention"
"""What transformers calls layers that attend to all earlier tokens."""
LINEAR = "linear_attention"
"""What transformers calls layers with a state."""


def kinds_of_layers(text: Any) -> tuple[str, ...]:
    """Return the kind of each layer, as transformers calls it.

    Args:
        text: transformers' config of a language model.
    """
    return tuple(getattr(text, "layer_types", None) or [FULL] * int(text.num_hidden_layers))


def num_attending_layers(text: Any) -> int:
    """Return how many layers attend to all earlier tokens.

    Args:
        text: transformers' config of a language model.
    """
    return int(text.num_hidden_layers) - num_linear_layers(text)


def state_flops(text: Any) -> float:
    """Return the operations of a token with the states of all layers that have one; 0 if none has.

    Each head multiplies its state with the token's key, adds the product of the key and the new part of the value, and
    multiplies the state with the query. That is three times two operations for each number of the state.

    Args:
        text: transformers' config of a language model.
    """
    if not (num_layers := num_linear_layers(text)):
        return 0.0
    of_head = int(text.linear_key_head_dim) * int(text.linear_value_head_dim)
    return 6.0 * num_layers * int(text.linear_num_value_heads) * of_head


def num_linear_layers(text: Any) -> int:
    """Return how many layers have a state.

    Args:
        text: transformers' config of a language model.
    """
    return kinds_of_layers(text).count(LINEAR)
