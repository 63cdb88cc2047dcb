"""The precision that a policy is computed in. Engines and trainer have one rule, because a push is not cast."""


def resolve_dtype(dtype: str, *, on_gpu: bool) -> str:
    """Return the configured precision; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype
