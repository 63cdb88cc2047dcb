"""Tells from a parameter's name to which part of the model it belongs."""

import re

from penstock.model.families.qwen_vl import part_of

_EXPERTS = ".experts."


def is_of_experts(name: str) -> bool:
    """Return whether a parameter belongs to the experts of a layer."""
    return _EXPERTS in name


def kind_of(name: str) -> str:
    """Return a parameter's name, or a module's, without the number of its layer or block."""
    return re.sub(r"\.(layers|blocks)\.\d+\.", r".\1.*.", name)


def layer_of(name: str) -> int | None:
    """Return the number of the text layer that holds the parameter."""
    if part_of(name) != "text" or ".layers." not in name:
        return None
    return int(name.split(".layers.")[1].split(".")[0])
