"""Image processors of engines: they follow the model's own files, and a CPU imports only those that a model needs.

Invariant: an engine turns a picture into the same tokens as worker and trainer, which read the same files.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.folder import read_json

_OWN_PACKAGE = "sglang.srt.multimodal.processors"
_postponed: list[Callable[[], None]] = []


def import_some(import_all: Callable[..., None], package: str, *args: Any, **kwargs: Any) -> None:
    """Hook around the import of a package of processors: import only those of Qwen's models if it is SGLang's own.

    The others import their models too, which adds three seconds to every start.
    """
    if package != _OWN_PACKAGE:  # a user's processors, which override SGLang's
        import_all(package, *args, **kwargs)
        return
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    PROCESSOR_MAPPING.update(dict.fromkeys(QwenVLImageProcessor.models, QwenVLImageProcessor))
    _postponed.append(functools.partial(import_all, package, *args, **kwargs))


def keep_bounds(folder: str, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before SGLang loads the processor of the model in `folder`: give it the bounds on pixels of that model's files.

    For Qwen2-VL SGLang sets 3,136 and 1,003,520 if it is given none. They replace the `size` that transformers 5 saves,
    but not the `min_pixels` and `max_pixels` of the published files.
    """
    path = Path(folder)
    if "size" not in kwargs and read_json(path / "config.json").get("model_type") == "qwen2_vl":
        grid = ImageGrid.of(path)
        kwargs["size"] = {"shortest_edge": grid.min_pixels, "longest_edge": grid.max_pixels}
    return (folder, *args), kwargs


def import_others(hf_config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook before SGLang makes the processor of a model: import the others unless the processor is already there."""
    from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING

    if not any(model.__name__ in hf_config.architectures for model in PROCESSOR_MAPPING):
        while _postponed:
            _postponed.pop()()
