"""Places the weights that are trained: on one device, with copies to update, or as shards of several ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from services.trainer.backend.device import DTYPES
from services.trainer.backend.files.adapter_state import AdapterState, BaseDigests
from services.trainer.backend.files.published_weights import PublishedWeights
from services.trainer.backend.optimizer.master_weights import CopiedMasterWeights, MasterWeights, ShardedMasterWeights
from services.trainer.backend.policy.adapters import adapter_parameters, base_weights
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.row_share import RowShare
from services.trainer.backend.ranks.expert_groups import ExpertGroups
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.ranks.sharding import full_shape, give_weights, shard
from services.trainer.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlacement:
    """Where the weights of one policy go."""

    policy: PolicyModel
    """With its weights on one rank; beside other ranks without, and each reads its shards."""
    adapters: AdapterState | None
    """None: all weights are trained."""
    folder: Path
    """The model folder that shards are read from."""
    config: BackendConfig
    device: torch.device
    seed: int
    """Decides the first values of adapters."""
    ranks: Ranks
    expert_parallel: int
    """Ranks among which the experts of a layer are divided."""

    def place(self) -> MasterWeights:
        """Place the weights; beside other ranks, all must call this together.

        Raises:
            ConfigError: `folder` holds no loadable model. What fails on one rank alone fails on all.
        """
        if self.ranks.size > 1:
            return self._place_shards()
        if self.adapters is not None:
            return self._place_adapters(self.adapters)
        parameters = dict(self.policy.model.named_parameters())
        offload, dtype = self.config.optimizer.offload, DTYPES[self.config.dtype]
        if not offload and dtype is torch.float32:
            self.policy.to(self.device)
            return MasterWeights(parameters)
        copies_on = torch.device("cpu") if offload else self.device
        weights = CopiedMasterWeights(parameters, device=self.device, dtype=dtype, copies_on=copies_on)
        self.policy.to(self.device)  # the buffers, which keep their precision
        return weights

    def _place_adapters(self, adapters: AdapterState) -> MasterWeights:
        base = dict(base_weights(self.policy.model))
        adapters.keep_digests(
            [adapters.digests_of_base(base.__getitem__, _sizes(base), device=self.device, ranks=ALONE)]
        )
        del base  # in float32, while what follows rounds it weight by weight
        parameters = adapter_parameters(self.policy.model)
        with torch.no_grad():
            for name, value in adapters.first_values(seed=self.seed).items():
                parameters[name].copy_(value)
        adapters.round_base()
        self.policy.to(self.device)
        return MasterWeights(parameters)

    def _place_shards(self) -> MasterWeights:
        if (sequence := self.ranks.sequence_group).size > 1:
            self.policy.share_rows(
                partial(RowShare, size=sequence.size, number=sequence.number, group=sequence.exchange)
            )
        model, adapters = self.policy.model, self.adapters
        groups = self.ranks.expert_groups(self.expert_parallel)
        if adapters is not None:
            adapters.round_base()
        shard(
            self.policy,
            self.ranks.mesh,
            dtype=None if adapters is not None else DTYPES[self.config.dtype],
            offload=self.config.optimizer.offload,
            groups=groups,
        )
        digests = self.ranks.on_each(partial(self._read_weights, groups))
        if adapters is None:
            return ShardedMasterWeights(dict(model.named_parameters()), groups)
        adapters.keep_digests(self.ranks.gather(digests))
        return ShardedMasterWeights(adapter_parameters(model))

    def _read_weights(self, groups: ExpertGroups | None) -> BaseDigests:
        """Read this rank's shards; return digests of its part of the base, if there are adapters."""
        model, adapters = self.policy.model, self.adapters
        shapes = {name: full_shape(parameter, groups) for name, parameter in model.named_parameters()}
        values = {} if adapters is None else adapters.first_values(seed=self.seed)
        with PublishedWeights(self.folder, model.config.model_type) as stored:

            def read(name: str, rows: slice = slice(None)) -> torch.Tensor:
                return values[name][rows] if name in values else stored.rows(name, shapes[name], rows)

            give_weights(model, read, groups)
            if adapters is None:
                return {}
            return adapters.digests_of_base(
                read, _sizes(dict(base_weights(model))), device=self.device, ranks=self.ranks
            )


def _sizes(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: weight.numel() for name, weight in weights.items()}
