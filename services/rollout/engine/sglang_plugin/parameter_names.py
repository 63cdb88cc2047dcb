"""The names under which SGLang takes parameters, where they are not those of transformers."""

_PUBLISHED_NAMES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Architectures that SGLang knows by the names of their published checkpoints, older than those of transformers 5."""


def load_name(name: str, architecture: str) -> str:
    """The name under which SGLang's `load_weights` takes the parameter that transformers calls `name`."""
    if architecture in _PUBLISHED_NAMES:
        for prefix, published in (("model.visual.", "visual."), ("model.language_model.", "model.")):
            if name.startswith(prefix):
                return published + name.removeprefix(prefix)
    return name
