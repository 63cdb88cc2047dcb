"""Merges pushed adapters (LoRA) into an engine's weights. Runs inside SGLang's scheduler processes.

The engine generates with plain weights, so that adapters cost it nothing per token. The matrices that adapters change
are kept as they were, in the host's memory, and each push computes the merged ones from them.

Invariant: the weights after a push depend on the base and on that push alone, whatever was pushed before or ended
half-way.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.weights.adapter_names import LORA_A, LORA_B
from penstock.weights.adapters import adapted_weights, change_of, merged
from penstock.weights.digest import tensor_digests
from penstock.weights.manifest import Manifest, TensorSpec, dtype_of
from services.rollout.engine.sglang_plugin.digests import digests_of
from services.rollout.engine.sglang_plugin.parameters import trainer_parameters
from services.rollout.engine.sglang_plugin.shards import Shard


class MergedAdapters:
    """The adapters in a model's weights, and those weights without them."""

    def __init__(
        self, shards: Callable[[], Mapping[str, Shard]], base_digests: Callable[[str], Mapping[str, int]]
    ) -> None:
        """Begin with weights that contain no adapter.

        Args:
            shards: Returns this process's part of every weight, by name.
            base_digests: Computes digests of a kind of the weights as they are. All processes of an engine call it
                together.
        """
        self._shards = shards
        self._compute = base_digests
        self._digests: dict[str, dict[str, int]] = {}
        """Digests of the base, by kind."""
        self._base: dict[str, torch.Tensor] = {}
        """This process's part of each changed matrix without its adapter, in the host's memory."""
        self._adapters: dict[str, torch.Tensor] = {}
        self._specs: tuple[TensorSpec, ...] = ()
        self._is_merged = True
        """Whether the last push has reached this process's matrices."""

    def make_room(self, manifest: Manifest, kind: str) -> dict[str, Shard]:
        """Return memory for a push's adapters, by name; it holds those of the push before if they have the same shapes.

        Args:
            manifest: Manifest of the push.
            kind: Kind of the digests that will be asked for.
        """
        self._is_merged = False
        changed = adapted_weights(manifest)
        shards = self._shards()
        if kind not in self._digests:
            self._restore(self._base, shards)
            self._digests[kind] = dict(self._compute(kind))
        unchanged = self._base.keys() - changed.keys()
        self._restore(unchanged, shards)
        for name in unchanged:
            del self._base[name]
        for name in changed.keys() - self._base.keys():
            self._base[name] = _on_host(shards[name].tensor)
        specs = tuple(manifest.tensors)
        if specs != self._specs:
            device = next(iter(shards.values())).tensor.device
            self._adapters = {
                spec.name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=device) for spec in specs
            }
            self._specs = specs
        return {name: Shard(tensor=tensor) for name, tensor in self._adapters.items()}

    def merge(self) -> None:
        """Compute the changed matrices from the base and the adapters that have arrived."""
        shards = self._shards()
        for name, base in self._base.items():
            shard, layer = shards[name], name.removesuffix(".weight")
            change = change_of(self._adapters[layer + LORA_A], self._adapters[layer + LORA_B])
            if shard.cut is not None:
                part = Shard(tensor=torch.empty_like(shard.tensor, dtype=change.dtype), cut=shard.cut)
                part.write(change)
                change = part.tensor
            shard.tensor.copy_(merged(base.to(shard.tensor.device), change))
        self._is_merged = True

    def digests(self, kind: str) -> dict[str, int]:
        """Return digests of the adapters and of the base, by name. Those of the base were computed before the merge.

        They match nothing if this process could not merge, because SGLang reports the failures of rank 0 alone.
        """
        digests = {**self._digests[kind], **tensor_digests(self._adapters.items(), kind)}
        return digests if self._is_merged else {name: digest ^ 1 for name, digest in digests.items()}

    def _restore(self, names: Any, shards: Mapping[str, Shard]) -> None:
        for name in names:
            shards[name].tensor.copy_(self._base[name])


_OF_MODEL: weakref.WeakKeyDictionary[Any, MergedAdapters] = weakref.WeakKeyDictionary()


def adapters_in(model: Any) -> MergedAdapters | None:
    """Return the adapters in an SGLang model's weights; None if its last push carried whole weights, or none came."""
    return _OF_MODEL.get(model)


def adapters_for(model: Any) -> MergedAdapters:
    """Return the adapters in an SGLang model's weights, for a push of others."""
    if model not in _OF_MODEL:
        model_of = weakref.ref(model)
        _OF_MODEL[model] = MergedAdapters(
            lambda: dict(trainer_parameters(model_of())),
            lambda kind: {name: int(text) for name, text in digests_of(model_of(), kind).items()},
        )
    return _OF_MODEL[model]


def forget_adapters(model: Any) -> None:
    """Note that whole weights are about to replace those of an SGLang model."""
    _OF_MODEL.pop(model, None)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.to("cpu", copy=True)
    return host.pin_memory() if tensor.is_cuda else host
