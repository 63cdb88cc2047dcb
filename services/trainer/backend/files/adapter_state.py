"""The adapters (LoRA) of a policy: what a checkpoint has of them, and the base that they belong to.

Invariant: adapters are continued over the base that they were trained on, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.errors import ConfigError, SetupError
from penstock.weights.digest import XXH3, digest_kind, tensor_digest
from services.trainer.backend.device import DTYPES
from services.trainer.backend.files.adapter_folder import ADAPTER, PREFIX, adapter_config, require_same_adapters
from services.trainer.backend.files.checkpoint_share import MODEL
from services.trainer.backend.files.export import combined_digest
from services.trainer.backend.files.file_plan import owners_of
from services.trainer.backend.files.tensor_files import StoredTensors
from services.trainer.backend.optimizer.master_weights import MasterWeights
from services.trainer.backend.policy.adapters import (
    adapter_parameters,
    add_adapters,
    first_values,
    round_base,
)
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.config import BackendConfig, LoraConfig

log = structlog.get_logger()

BaseDigests = dict[str, tuple[int, int]]
"""By the name of a weight of the base: digests of it in float32, and as engines hold it."""


class AdapterState:
    """The adapters of one policy."""

    base_digest: str
    """One digest of the base in float32."""
    pushed_digests: Mapping[str, int]
    """Digests of the base as engines hold it, by name, of the kind that is fast on the trainer's device."""

    def __init__(self, policy: PolicyModel, config: BackendConfig, *, base_path: Path) -> None:
        """Give a policy in float32 its adapters, and freeze everything else.

        The adapters have no values yet, nor the base digests.

        Args:
            policy: The base, with or without memory for its weights.
            config: Adapters and precision.
            base_path: Folder that the policy is loaded from.

        Raises:
            ConfigError: the model cannot have them.
        """
        self._policy = policy
        self._config = config
        self._base_path = base_path
        self._layers = add_adapters(policy.model, config.lora)
        num_trained = sum(parameter.numel() for parameter in adapter_parameters(policy.model).values())
        log.info("adapters.added", num_layers=len(self._layers), num_trained=num_trained)

    def first_values(self, *, seed: int) -> dict[str, torch.Tensor]:
        """Return what the adapters begin with, in full, by name."""
        return first_values(self._policy.model, seed=seed)

    def round_base(self) -> None:
        """Keep the weights of the base in the precision of computation."""
        round_base(self._policy.model, DTYPES[self._config.dtype])

    def digests_of_base(
        self, read: Callable[[str], torch.Tensor], sizes: Mapping[str, int], *, device: torch.device, ranks: Ranks
    ) -> BaseDigests:
        """Return digests of some weights of the base; all ranks together return those of all weights.

        Args:
            read: Returns a weight in full, in float32, by its name.
            sizes: Of all weights of the base.
            device: That of the policy.
            ranks: The ranks among which the weights are divided.
        """
        dtype, kind = DTYPES[self._config.dtype], digest_kind(device)
        digests = {}
        for name, owner in owners_of(sizes, ranks.size).items():
            if owner == ranks.rank:
                weight = read(name)
                digests[name] = (tensor_digest(weight, XXH3), tensor_digest(weight.to(device, dtype), kind))
        return digests

    def keep_digests(self, of_ranks: Sequence[BaseDigests]) -> None:
        """Keep the digests of all weights of the base, given each rank's."""
        digests = {name: both for each in of_ranks for name, both in each.items()}
        self.base_digest = combined_digest({name: in_float32 for name, (in_float32, _) in digests.items()})
        self.pushed_digests = {name: pushed for name, (_, pushed) in digests.items()}

    def load(self, weights: MasterWeights, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Continue with the adapters of a checkpoint.

        Args:
            weights: The adapters, of which each rank reads its shard.
            state: The checkpoint's.
            checkpoint: Its folder.

        Raises:
            ConfigError: it has adapters for other layers.
            SetupError: they belong to another base.
        """
        folder = checkpoint / ADAPTER
        if state["base"] != self.base_digest:
            raise SetupError(
                f"model.path = {str(self._base_path)!r} holds another model than the one whose adapters are in {folder}"
                "; give the folder that the run began with"
            )
        own = weights.shards
        with StoredTensors(folder) as stored, torch.no_grad():
            if other := sorted(own.keys() ^ {name.removeprefix(PREFIX) for name in stored.names}):
                raise ConfigError(
                    f"trainer.lora.targets: {folder} has adapters for other layers than the recipe, such as {other[0]}"
                    "; a run keeps them: restore them, or begin a new run with the model that `penstock export` writes"
                )
            for name, weight in own.items():
                weight.copy_(weights.read_shard(name, partial(stored.rows, PREFIX + name)))

    def described(self) -> dict[str, Any]:
        """Return the contents of adapter_config.json."""
        names = [name for name, _ in self._policy.model.named_modules()]
        return adapter_config(self._config.lora, self._layers, names, self._base_path)


def require_kind(checkpoint: Path, lora: LoraConfig) -> None:
    """Check that a checkpoint has what the recipe trains: adapters of the same kind, or whole weights.

    Raises:
        ConfigError: it has not.
    """
    has_adapters = (checkpoint / ADAPTER).is_dir()
    if has_adapters and not lora.rank:
        raise ConfigError(
            f"{checkpoint} holds adapters alone, and trainer.lora.rank is 0: set it as the run began, or begin a new "
            "run with the model that `penstock export` writes"
        )
    if lora.rank and not has_adapters:
        raise ConfigError(
            f"{checkpoint} has whole weights, and trainer.lora.rank = {lora.rank} trains adapters; leave it out, or "
            f"begin a new run with --model.path={checkpoint / MODEL}"
        )
    if has_adapters:
        require_same_adapters(checkpoint / ADAPTER, lora)
