"""Image processors for engines on CPUs: those of Qwen's models at first, all others only for a model that needs one.

SGLang imports the processors of all its models, and with them the models, which takes three seconds of every start.
"""

import functools
from collections.abc import Callable
from typing import Any

_OWN_PACKAGE = "sglang.srt.multimodal.processors"
_postponed: list[Callable[[], None]] = []


def import_some(import_all: Callable[..., None], package: str, *args: Any, **kwargs: Any) -> None:
    """Instead of importing all processors of SGLang's own package: import those of Qwen's models."""
    if package != _OWN_PACKAGE:  # somebody's own processors, which come over SGLang's
        import_all(package, *args, **kwargs)
        return
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    PROCESSOR_MAPPING.update(dict.fromkeys(QwenVLImageProcessor.models, QwenVLImageProcessor))
    _postponed.append(functools.partial(import_all, package, *args, **kwargs))


def import_others(hf_config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before SGLang makes the processor of a model: import the others if it is not among those that are there."""
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING

    if not any(model.__name__ in hf_config.architectures for model in PROCESSOR_MAPPING):
        while _postponed:
            _postponed.pop()()
