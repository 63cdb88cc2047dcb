"""Image processors of engines: they follow the model's own files, a CPU imports only those that a model needs, and the
samples of a group share their prompt.

Invariant: an engine turns a picture into the same tokens as worker and trainer, which read the same files.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.folder import read_json

_OWN_PACKAGE = "sglang.srt.multimodal.processors"
_MAX_PROMPTS = 64
"""Prompts of which an engine keeps the expanded ids and positions: 2.3 MB each with 32,000 tokens."""
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

    PROCESSOR_MAPPING.update(dict.fromkeys(QwenVLImageProcessor.models, sharing_prompts(QwenVLImageProcessor)))
    _postponed.append(functools.partial(import_all, package, *args, **kwargs))


def sharing_prompts(processor: type) -> type:
    """Return a Qwen `processor` that expands images in a prompt of ids once for the samples of a group.

    SGLang does so for prompts of text, by a cache of its own; of either it copies what requests may change. Its server
    in Rust, which Penstock does not start, would not take the class for a Qwen one.
    """

    class SharingPrompts(processor):  # type: ignore[misc]
        def _build_image_prompt_template(self, prompt: str | list[int], grids: tuple[tuple[int, ...], ...]) -> Any:
            if isinstance(prompt, str):
                return super()._build_image_prompt_template(prompt, grids)
            return self._expanded(tuple(prompt), grids)

        @functools.lru_cache(maxsize=_MAX_PROMPTS)  # noqa: B019 - an engine has one processor, for ever
        def _expanded(self, ids: tuple[int, ...], grids: tuple[tuple[int, ...], ...]) -> Any:
            return super()._build_image_prompt_template(list(ids), grids)

    SharingPrompts.__name__ = processor.__name__  # for SGLang's log
    return SharingPrompts


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
