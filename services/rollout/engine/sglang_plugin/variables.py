"""What travels from the engine's process to the hooks inside SGLang's, as environment variables and agreed names."""

import dataclasses

START_METHOD_VARIABLE = "PENSTOCK_SGLANG_START_METHOD"
"""How SGLang's children start: "fork" shares the parent's imports, "spawn" imports anew. Unset: SGLang is not ours."""

GROUP_TIMEOUT_VARIABLE = "PENSTOCK_WEIGHT_GROUP_TIMEOUT_S"
"""Seconds after which SGLang's part in a weight group gives up. Unset: torch's own half an hour."""

PAIR_DEADLINE_VARIABLE = "PENSTOCK_PAIR_DEADLINE_S"
"""Seconds that a decode engine looks for a prefill engine that does not answer. Unset: SGLang's own 15."""

HOST_TRANSFER_VARIABLE = "PENSTOCK_HOST_TRANSFER"
"""What carries the KV cache between engines that hold it in host memory: "mooncake" or "nixl". Unset: it is on GPUs."""

DIGEST_ACTION = "penstock_digests:"
"""Action of SGLang's weight checker, before a kind of digest: answers with every parameter's `penstock.weights.digest`,
by name."""

PARAMETERS_ACTION = "penstock_parameters"
"""Action of SGLang's weight checker that answers with every parameter's dtype and shape, by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter as the engine holds it."""

    dtype: str
    shape: tuple[int, ...]


def describe_parameter(parameter: HeldParameter) -> str:
    """The parameter as one string, the only kind of value that SGLang's weight checker carries."""
    return f"{parameter.dtype}|{','.join(map(str, parameter.shape))}"


def parse_parameter(text: str) -> HeldParameter:
    """The inverse of `describe_parameter`."""
    dtype, shape = text.split("|")
    return HeldParameter(dtype=dtype, shape=tuple(int(size) for size in shape.split(",") if size))
