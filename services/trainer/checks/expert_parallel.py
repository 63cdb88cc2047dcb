"""Whether ranks can divide the experts of a model. Pure, so that it is checked before anything heavy is loaded."""

from penstock.errors import ConfigError


def require_divisible(expert_parallel: int, *, num_ranks: int, num_experts: int) -> None:
    """Check that ranks can share the experts of a model.

    Args:
        expert_parallel: `trainer.expert_parallel`; 1 needs nothing.
        num_ranks: All ranks of the trainer.
        num_experts: Experts of a layer; 0 for a dense model.

    Raises:
        ConfigError: they cannot.
    """
    if expert_parallel == 1:
        return
    if num_experts == 0:
        raise ConfigError(
            f"trainer.expert_parallel = {expert_parallel} is for mixtures of experts, and model.path has a dense "
            "model; leave it out"
        )
    if num_experts % expert_parallel:
        raise ConfigError(
            f"trainer.expert_parallel = {expert_parallel} does not divide the model's {num_experts} experts; choose "
            "a number that does"
        )
    if num_ranks % expert_parallel:
        raise ConfigError(
            f"trainer.expert_parallel = {expert_parallel} does not divide the trainer's ranks, of which there "
            f"{'is 1' if num_ranks == 1 else f'are {num_ranks}'}; choose a number that does, or change trainer.ranks"
        )
