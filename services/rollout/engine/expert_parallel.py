"""Whether engines can divide the experts of a model. Pure, so that it is checked before anything heavy is loaded."""

from penstock.errors import ConfigError


def require_whole_experts(expert_parallel: int, *, num_experts: int) -> None:
    """Check that the processes of an engine can divide a layer's experts as wholes, equally many each.

    Args:
        expert_parallel: `rollout.expert_parallel`; 1 needs nothing.
        num_experts: Experts of a layer; 0 for a dense model.

    Raises:
        ConfigError: they cannot.
    """
    if expert_parallel == 1:
        return
    if num_experts == 0:
        raise ConfigError(
            f"rollout.expert_parallel = {expert_parallel} is for mixtures of experts, and model.path has a dense "
            "model; leave it out"
        )
    if num_experts % expert_parallel:
        raise ConfigError(
            f"rollout.expert_parallel = {expert_parallel} does not divide the model's {num_experts} experts; leave it "
            "out, or choose a number that does, also for rollout.tensor_parallel"
        )
