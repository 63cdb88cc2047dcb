"""Loads the weights of a push into the parameters, inside SGLang's scheduler process.

Several buckets are in flight while one is loaded. A bucket with one tensor is received directly in its parameter's
memory. Buckets of several small tensors go through a buffer, and so do parameters that several processes share: each
process receives the whole parameter and keeps its shard. Until the addresses of the parameters are proven, SGLang's
own loader takes the tensors one by one. Adapters are received beside the parameters, and merged into them.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import torch

from penstock.model.families.experts import published_experts
from penstock.model.families.qwen_vl import published_name
from penstock.weights.adapters import adapted_weights
from penstock.weights.manifest import Manifest, TensorSpec
from services.rollout.engine.sglang_plugin.merged_adapters import adapters_for, forget_adapters
from services.rollout.engine.sglang_plugin.parameters import trainer_parameters
from services.rollout.engine.sglang_plugin.shards import Shard
from services.rollout.engine.sglang_plugin.transports import Transport
from services.rollout.engine.sglang_plugin.transports.destination import Destination

_PREFIX = "penstock:"


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's message to SGLang's scheduler beside names, dtypes and shapes, in the field `load_format`."""

    bucket_lengths: tuple[int, ...]
    """Number of tensors in each bucket."""
    transport: Transport
    is_direct: bool
    """Write into the parameters, instead of using SGLang's loader."""
    digest: str
    """The kind of digest by which the push is verified."""

    def to_load_format(self) -> str:
        """Encode as text."""
        return _PREFIX + msgspec.json.encode(self).decode()

    @classmethod
    def from_load_format(cls, text: str | None) -> Self | None:
        """Decode from text; return None for SGLang's own load formats."""
        if text is None or not text.startswith(_PREFIX):
            return None
        return msgspec.json.decode(text.removeprefix(_PREFIX), type=cls)

    def manifest(self, specs: Sequence[TensorSpec]) -> Manifest:
        """Group the tensors into buckets."""
        left = iter(specs)
        return Manifest(tuple(tuple(itertools.islice(left, length)) for length in self.bucket_lengths))


def load(receive: Any, updater: Any, **request: Any) -> Any:
    """Hook around SGLang's `WeightUpdater.receive_weights_from_distributed`: return what SGLang's loader must load."""
    order = LoadOrder.from_load_format(request["load_format"])
    if order is None:
        return receive(updater, **request)
    model, device, groups = updater.get_model(), torch.device(updater.device), updater._model_update_group
    described = zip(request["names"], request["dtypes"], request["shapes"], strict=True)
    manifest = order.manifest(
        [TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in described]
    )
    if adapted_weights(manifest):
        adapters = adapters_for(model)
        take_into(adapters.make_room(manifest, order.digest), manifest, order.transport, groups)
        adapters.merge()
        return []
    forget_adapters(model)
    if order.is_direct:
        take_into(dict(trainer_parameters(model)), manifest, order.transport, groups)
        refresh_derived(model)
        return []
    architecture = updater.model_config.hf_config.architectures[0]
    arrivals = order.transport.arrivals(manifest, Destination({}, device), groups)
    return (
        (published_name(own_name, architecture), tensor)
        for name, weight in arrivals
        for own_name, tensor in published_experts(name, weight, architecture)
    )


def refresh_derived(model: Any) -> None:
    """Compute again what an SGLang model has derived from its weights, as its own loader does. Some norms keep their
    weight plus one, which fused kernels on GPUs read."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    for module in model.modules():
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()


def take_into(shards: Mapping[str, Shard], manifest: Manifest, transport: Transport, groups: Mapping[str, Any]) -> None:
    """Write each tensor, or this process's shard of it, into the parameter of its name.

    Raises:
        NotReadyError: shared memory was freed.
        ValueError: blocks of a delta are damaged.
    """
    device = next(iter(shards.values())).tensor.device
    held = {name: shard.tensor for name, shard in shards.items() if shard.cut is None}
    destination = Destination(held, device, holds_all=len(held) == len(shards))
    with contextlib.closing(transport.arrivals(manifest, destination, groups)) as arrivals:
        for name, tensor in arrivals:
            shards[name].write(tensor)
