"""Whether a learning rate's schedule fits into a run. Pure, so that it is checked before anything starts."""

from services.trainer.config import OptimizerConfig


def schedule_contradiction(optimizer: OptimizerConfig, *, num_steps: int) -> str:
    """Return why the schedule does not fit into a run of `num_steps`; empty if it does."""
    warmup_steps, decay_steps = optimizer.warmup_steps, optimizer.schedule.decay_steps
    if optimizer.schedule.kind == "constant" or (warmup_steps + decay_steps <= num_steps and warmup_steps < num_steps):
        return ""
    return (
        f"trainer.optimizer.warmup_steps = {warmup_steps} and schedule.decay_steps = {decay_steps} do not fit into "
        f"{num_steps} steps; lower them"
    )


def warmup_doubt(optimizer: OptimizerConfig, *, num_steps: int) -> str:
    """Return a warning about a run of `num_steps` that ends within its warm-up; empty if it does not."""
    if optimizer.warmup_steps < num_steps:
        return ""
    return (
        f"trainer.optimizer.warmup_steps = {optimizer.warmup_steps} is not below the number of steps, {num_steps}: the "
        "run ends before it reaches its learning rate; lower it"
    )
