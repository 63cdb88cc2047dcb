"""The reference policy: frozen weights that the loss compares the policy with.

Legend: N = own tokens of a row.

Its weights are kept in the host's memory. From a step's first chunk to its last they are on the device beside the
policy's, and the policy's own module computes with them; no second model exists. So they move to the device once per
step, however many chunks it has, and are gone when the optimizer needs the room. If many ranks hold shards of the
policy, each has its shard of the reference, and the two are swapped while the reference computes. Its routers choose
experts themselves: those that the engine recorded are the policy's choice.

Of a policy with adapters the reference has adapters alone, over the same base. Those that it begins with change
nothing, so a reference that is never refreshed is the policy with its adapters off.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from services.trainer.algorithm.axes import KlConfig
from services.trainer.backend.files.published_weights import PublishedWeights
from services.trainer.backend.optimizer.master_weights import MasterWeights, ShardedMasterWeights
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.ranks.sharding import forget_gathered
from services.trainer.batching.rows import PackedRow
from services.trainer.data.named_section import named_section


class ReferencePolicy:
    """A frozen copy of the policy, refreshed as the recipe says; or another model."""

    def __init__(
        self,
        policy: torch.nn.Module,
        weights: MasterWeights,
        config: KlConfig,
        *,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Start with the policy's current weights.

        Args:
            policy: Returns `TokenLogprobs` of a row.
            weights: Its master weights.
            config: When the reference follows the policy.
            precision: Context in which the policy computes.
        """
        self._policy = policy
        self._masters = weights
        self._config = config
        self._precision = precision
        self._num_updates = 0
        self._weights = {
            _in_policy(name): _on_host(weights.local_shard(name, weight)) for name, weight in weights.named()
        }
        self._on_device: dict[str, torch.Tensor] | None = None

    def logprobs(self, rows: Iterable[PackedRow]) -> list[torch.Tensor]:
        """Return float32[N] for each row. One rank's weights stay on the device until `release`."""
        if isinstance(self._masters, ShardedMasterWeights):
            with self._masters.replaced_by({_own(name): weight for name, weight in self._weights.items()}):
                logprobs = self._computed(self._policy, rows)
                forget_gathered(self._policy)
                if any(each.is_cuda for each in logprobs):
                    torch.cuda.synchronize()  # offloaded shards may still be on their way from where the policy's go
            return logprobs
        if self._on_device is None:
            parameters = dict(self._policy.named_parameters())
            self._on_device = {
                name: weight.to(parameters[name].device, parameters[name].dtype, non_blocking=True)
                for name, weight in self._weights.items()
            }
        compute = partial(torch.func.functional_call, self._policy, self._on_device)
        return self._computed(lambda row: compute((row,)), rows)

    def _computed(self, compute: Callable[[PackedRow], TokenLogprobs], rows: Iterable[PackedRow]) -> list[torch.Tensor]:
        with torch.no_grad(), self._precision():
            return [compute(replace(row, routed_experts_TLK=None)).logprobs_N.float() for row in rows]

    def release(self) -> None:
        """Free the device's memory, after the last pass of a step."""
        self._on_device = None

    def count_update(self) -> None:
        """Count an optimizer step that has ended; refresh the reference if it is due."""
        self._num_updates += 1
        if self._config.refresh == "never" or self._num_updates % self._config.refresh_every:
            return
        share = 1.0 if self._config.refresh == "copy" else self._config.ema_weight
        for name, weight in self._masters.named():
            self._weights[_in_policy(name)].lerp_(self._masters.local_shard(name, weight).to("cpu"), share)

    def read_model(self, folder: Path) -> None:
        """Become the model in a folder. This rank reads the same part of its weights that it holds of the policy's.

        Raises:
            ConfigError: it cannot be loaded, or has not the policy's weights and sizes.
        """
        with named_section("algorithm.kl.reference"):
            model = load_policy(folder, temperature=1.0, forbidden_ids=(), with_weights=False).model
        sizes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        own = self._masters.shapes
        wrong = sorted(name for name in own.keys() | sizes.keys() if own.get(name) != sizes.get(name))
        if wrong:
            theirs, ours = (list(each[wrong[0]]) if wrong[0] in each else "none" for each in (sizes, own))
            raise ConfigError(
                f"algorithm.kl.reference = {str(folder)!r} differs from the trained model in {len(wrong)} weights, "
                f"such as {wrong[0]}: {theirs} instead of {ours}; take a model of the same architecture and sizes"
            )
        with PublishedWeights(folder, model.config.model_type) as stored:
            for name, shape in sizes.items():
                shard = self._masters.read_shard(name, partial(stored.rows, name, shape))
                self._weights[_in_policy(name)].copy_(shard)

    @property
    def shards(self) -> dict[str, torch.Tensor]:
        """This rank's shard of every weight, by its own name."""
        return {_own(name): weight for name, weight in self._weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, beside `shards`, for `load_state_dict`."""
        return {"num_updates": self._num_updates}

    def load_state_dict(self, state: Mapping[str, Any], shards: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Continue from the state of a checkpoint, given this rank's shard of every weight, one after the other."""
        self._num_updates = state["num_updates"]
        for name, weight in shards:
            self._weights[_in_policy(name)].copy_(weight)


def _in_policy(name: str) -> str:
    """Return the name within `PolicyModel`, which holds the transformers model as `model`."""
    return f"model.{name}"


def _own(name_in_policy: str) -> str:
    return name_in_policy.removeprefix("model.")


def _on_host(weight: torch.Tensor) -> torch.Tensor:
    host = weight.to("cpu", copy=True)
    return host.pin_memory() if weight.is_cuda else host
