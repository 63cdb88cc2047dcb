"""Compares the GPUs of a process with those that its settings use, before it loads anything.

With fewer it could not start; with more, some would be idle, and nothing would say so.
"""

from penstock.errors import ConfigError
from services.recipe import Recipe


def require_gpus(recipe: Recipe, service: str, *, num_gpus: int) -> None:
    """Check that a process uses all of its GPUs.

    Args:
        recipe: The recipe.
        service: The service's name in `penstock serve`.
        num_gpus: GPUs that whoever starts it gives it, such as the `gpus` of a pod.

    Raises:
        ConfigError: its settings use another number, or it computes on no GPU.
    """
    counts = {"rollout": ("rollout.tensor_parallel", recipe.rollout.tensor_parallel)}
    if recipe.trainer.device != "cpu":
        counts["trainer"] = ("trainer.ranks", recipe.trainer.ranks)
    if service not in counts:
        what = "trainer.device = 'cpu'" if service == "trainer" else f"the {service} computes on no GPU"
        raise ConfigError(f"--gpus={num_gpus}, and {what}; give it no GPU (`gpus` in the values of the Helm chart)")
    key, used = counts[service]
    if used != num_gpus:
        raise ConfigError(
            f"{key} = {used} uses {used} GPUs, and this process has {num_gpus} (--gpus); set {key} to {num_gpus}, or "
            f"give it {used} (`gpus` in the values of the Helm chart)"
        )
