"""Environment variables and names through which the engine's process reaches the hooks inside SGLang's processes."""

import dataclasses

START_METHOD_VARIABLE = "PENSTOCK_SGLANG_START_METHOD"
"""How SGLang's children start: "fork" shares the parent's imports, "spawn" repeats them. Unset: Penstock did not start
this SGLang."""

GROUP_TIMEOUT_VARIABLE = "PENSTOCK_WEIGHT_GROUP_TIMEOUT_S"
"""Timeout of SGLang's part in the process group of a push, in seconds. Unset: torch's 30 minutes."""

PAIR_DEADLINE_VARIABLE = "PENSTOCK_PAIR_DEADLINE_S"
"""Seconds for which a decode engine looks for a prefill engine that does not answer. Unset: SGLang's 15."""

HOST_TRANSFER_VARIABLE = "PENSTOCK_HOST_TRANSFER"
"""The transfer back end, "mooncake" or "nixl", if engines hold the KV cache in host memory. Unset: it is on GPUs."""

DIGEST_ACTION = "penstock_digests:"
"""Action of SGLang's weight checker, followed by a kind of digest: returns every parameter's digest by name."""

PARAMETERS_ACTION = "penstock_parameters"
"""Action of SGLang's weight checker: returns every parameter's dtype and shape by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter as the engine holds it."""

    dtype: str
    shape: tuple[int, ...]


def describe_parameter(parameter: HeldParameter) -> str:
    """Encode the parameter as a string, the only kind of value that SGLang's weight checker returns."""
    return f"{parameter.dtype}|{','.join(map(str, parameter.shape))}"


def parse_parameter(text: str) -> HeldParameter:
    """Decode a string of `describe_parameter`."""
    dtype, shape = text.split("|")
    return HeldParameter(dtype=dtype, shape=tuple(int(size) for size in shape.split(",") if size))
