"""Changes to SGLang for models that attend linearly, through its plugin hooks: see `sglang_plugin/hooks.py`."""

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.rollout.engine.sglang_plugin.linear_attention import on_cpu


def register() -> None:
    """Register the hooks, which import SGLang's model of the family."""
    HookRegistry.register("sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet.__init__", round_decay, HookType.AFTER)
    if not torch.cuda.is_available():
        on_cpu.register()


def round_decay(_result: None, layer: Any, *_: Any, **__: Any) -> None:
    """Hook after a layer is made: its `A_log` is rounded to the model's precision when it is loaded.

    SGLang holds it in float32 whatever the precision; the trainer rounds it like every other weight. Pushed ones are
    rounded already.
    """
    load, dtype = layer.A_log.weight_loader, torch.get_default_dtype()
    layer.A_log.weight_loader = lambda parameter, loaded: load(parameter, loaded.to(dtype))
