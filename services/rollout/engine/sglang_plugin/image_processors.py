"""Image processors for engines on CPUs: only those of Qwen's models at first, the others when a model needs one.

By default SGLang imports the processors of all its models, and the models with them, which adds three seconds to every
start.
"""

import functools
from collections.abc import Callable
from typing import Any

_OWN_PACKAGE = "sglang.srt.multimodal.processors"
_postponed: list[Callable[[], None]] = []


def import_some(import_all: Callable[..., None], package: str, *args: Any, **kwargs: Any) -> None:
    """Hook around the import of a package of processors: import only those of Qwen's models if it is SGLang's own."""
    if package != _OWN_PACKAGE:  # a user's processors, which override SGLang's
        import_all(package, *args, **kwargs)
        return
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    PROCESSOR_MAPPING.update(dict.fromkeys(QwenVLImageProcessor.models, QwenVLImageProcessor))
    _postponed.append(functools.partial(import_all, package, *args, **kwargs))


def import_others(hf_config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang makes the processor of a model: import the others unless the processor is already there."""
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING

    if not any(model.__name__ in hf_config.architectures for model in PROCESSOR_MAPPING):
        while _postponed:
            _postponed.pop()()
