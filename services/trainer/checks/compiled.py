"""Whether the layers of a model can be compiled. Pure, so that it is checked before anything heavy is loaded."""

from penstock.errors import ConfigError


def require_compilable(is_compiled: bool, *, is_mixture: bool, attends_linearly: bool) -> None:
    """Check that a model can be compiled. Mixtures and linear attention cannot: their products depend on what routers
    choose, and on the lengths of a row's segments.

    Args:
        is_compiled: `trainer.compile`; False needs nothing.
        is_mixture: Whether the model is a mixture of experts.
        attends_linearly: Whether it has layers of linear attention.

    Raises:
        ConfigError: it cannot.
    """
    if is_compiled and is_mixture:
        raise ConfigError(
            "trainer.compile = true does not go with mixtures of experts yet; leave it out, or train a dense model"
        )
    if is_compiled and attends_linearly:
        raise ConfigError("trainer.compile = true does not go with linear attention (Qwen3.5) yet; leave it out")
