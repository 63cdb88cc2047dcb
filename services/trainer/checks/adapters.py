"""Checks that other settings go with adapters (`[trainer.lora]`)."""

from penstock.errors import ConfigError
from services.trainer.algorithm.axes import KlConfig
from services.trainer.config import LoraConfig


def require_adaptable(lora: LoraConfig, *, attends_linearly: bool) -> None:
    """Check that a model takes adapters.

    Args:
        lora: The adapters; with rank 0 there are none.
        attends_linearly: Whether it has layers of linear attention.

    Raises:
        ConfigError: it does not.
    """
    if lora.rank and attends_linearly:
        raise ConfigError(
            f"trainer.lora.rank = {lora.rank} does not go with linear attention (Qwen3.5) yet: adapters of its "
            "projections are not tested; leave trainer.lora out"
        )


def adapter_contradiction(lora: LoraConfig, kl: KlConfig) -> str | None:
    """Return why a reference policy does not go with adapters; None if it does."""
    if lora.rank and kl.reference is not None:
        return (
            f"algorithm.kl.reference = {str(kl.reference)!r} does not go with trainer.lora.rank = {lora.rank}: the "
            "reference is the base with the adapters of an earlier step, or none; leave reference out"
        )
    if lora.rank and kl.refresh == "ema" and kl.ema_weight < 1:
        return (
            f"algorithm.kl.refresh = 'ema' does not go with trainer.lora.rank = {lora.rank}: the product of averaged "
            "adapters is no average of the policies; set refresh = 'copy'"
        )
    return None
