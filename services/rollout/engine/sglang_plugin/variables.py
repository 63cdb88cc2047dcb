"""Environment variables and names through which the engine's process reaches the hooks inside SGLang's processes."""

import dataclasses

START_METHOD_VARIABLE = "PENSTOCK_SGLANG_START_METHOD"
"""How SGLang's children start: "fork" shares the parent's imports, "spawn" repeats them. Unset: Penstock did not start
this SGLang."""

LINEAR_ATTENTION_VARIABLE = "PENSTOCK_LINEAR_ATTENTION"
"""Set for models that attend linearly, which need further hooks."""

GROUP_TIMEOUT_VARIABLE = "PENSTOCK_WEIGHT_GROUP_TIMEOUT_S"
"""Timeout of SGLang's part in the process group of a push, in seconds. Unset: torch's 30 minutes."""

PAIR_DEADLINE_VARIABLE = "PENSTOCK_PAIR_DEADLINE_S"
"""Seconds for which a decode engine looks for a prefill engine that does not answer. Unset: SGLang's 15."""

HOST_TRANSFER_VARIABLE = "PENSTOCK_HOST_TRANSFER"
"""The transfer back end, "mooncake" or "nixl", if engines hold the KV cache in host memory. Unset: it is on GPUs."""

_BEFORE = "@before="

DIGEST_ACTION = "penstock_digests:"
"""Action of SGLang's weight checker, followed by a kind of digest: returns every parameter's digest by name."""

PARAMETERS_ACTION = "penstock_parameters"
"""Action of SGLang's weight checker: returns every parameter's dtype and shape by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter as the engine holds it."""

    dtype: str
    shape: tuple[int, ...]


def name_to_join(name: str, *, before: float) -> str:
    """Encode until when a process group is worth joining into its name: later its trainer no longer waits.

    Args:
        name: Name of the group.
        before: A time of the monotonic clock, which the engine's processes share.
    """
    return f"{name}{_BEFORE}{before!r}"


def parse_name_to_join(text: str) -> tuple[str, float]:
    """Decode what `name_to_join` encoded; a plain name is worth joining at any time."""
    name, _, before = text.partition(_BEFORE)
    return name, float(before or "inf")


def describe_parameter(parameter: HeldParameter) -> str:
    """Encode the parameter as a string, the only kind of value that SGLang's weight checker returns."""
    return f"{parameter.dtype}|{','.join(map(str, parameter.shape))}"


def parse_parameter(text: str) -> HeldParameter:
    """Decode a string of `describe_parameter`."""
    dtype, shape = text.split("|")
    return HeldParameter(dtype=dtype, shape=tuple(int(size) for size in shape.split(",") if size))
