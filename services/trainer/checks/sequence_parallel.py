"""Whether ranks can share the rows of a model. Pure, so that it is checked before anything heavy is loaded."""

from penstock.errors import ConfigError


def require_shareable(
    sequence_parallel: int, *, num_ranks: int, num_heads: int, num_kv_heads: int, attends_linearly: bool
) -> None:
    """Check that ranks can share rows: in attention each has some of the heads.

    Args:
        sequence_parallel: `trainer.sequence_parallel`; 1 needs nothing.
        num_ranks: All ranks of the trainer.
        num_heads: Attention heads of a text layer.
        num_kv_heads: Its heads of keys and values; fewer than ranks are repeated.
        attends_linearly: Whether other layers attend linearly, which ranks do not share.

    Raises:
        ConfigError: they cannot.
    """
    if sequence_parallel == 1:
        return
    if attends_linearly:
        raise ConfigError(
            f"trainer.sequence_parallel = {sequence_parallel} does not go with linear attention (Qwen3.5) yet; "
            "leave it out"
        )
    if num_ranks % sequence_parallel:
        raise ConfigError(
            f"trainer.sequence_parallel = {sequence_parallel} does not divide the trainer's ranks, of which there "
            f"{'is 1' if num_ranks == 1 else f'are {num_ranks}'}; choose a number that does, or change trainer.ranks"
        )
    if not shares_heads(sequence_parallel, num_heads, num_kv_heads):
        raise ConfigError(
            f"trainer.sequence_parallel = {sequence_parallel} cannot share the model's {num_heads} attention heads "
            f"and {num_kv_heads} heads of keys and values; choose a number that divides the first, and divides the "
            "second or is a multiple of it"
        )


def shares_heads(num_ranks: int, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether ranks can have equally many heads each, with the keys and values that these need."""
    return num_heads % num_ranks == 0 and max(num_kv_heads, num_ranks) % min(num_kv_heads, num_ranks) == 0
