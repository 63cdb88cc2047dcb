"""The adapters (LoRA) of a policy: what a checkpoint has of them, and the base that they belong to.

Invariant: adapters are continued over the base that they were trained on, to the bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import structlog
import torch

from penstock.errors import ConfigError, SetupError
from penstock.weights.digest import XXH3, digest_kind, tensor_digest
from services.trainer.backend.device import DTYPES
from services.trainer.backend.files.adapter_folder import ADAPTER, PREFIX, adapter_config, require_same_adapters
from services.trainer.backend.files.checkpoint_share import MODEL
from services.trainer.backend.files.export import combined_digest
from services.trainer.backend.files.tensor_files import StoredTensors
from services.trainer.backend.optimizer.adapter_weights import AdapterWeights
from services.trainer.backend.policy.adapters import add_adapters, frozen_weights, round_bases
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.config import BackendConfig, LoraConfig

log = structlog.get_logger()


class AdapterState:
    """The adapters of one policy."""

    def __init__(self, policy: PolicyModel, config: BackendConfig, layers: list[str], base_path: Path) -> None:
        """Use `add`."""
        self._policy = policy
        self._config = config
        self._layers = layers
        self._base_path = base_path
        self._pushed_digests: dict[str, int] = {}
        self.base_digest = combined_digest(
            {name: tensor_digest(weight, XXH3) for name, weight in frozen_weights(policy.model)}
        )
        """One digest of the base in float32."""

    @classmethod
    def add(cls, policy: PolicyModel, config: BackendConfig, *, seed: int, base_path: Path) -> Self:
        """Give a policy in float32 on the CPU its adapters, and freeze everything else.

        Args:
            policy: The base.
            config: Adapters and precision.
            seed: Seed of their first values.
            base_path: Folder that the policy was loaded from.

        Raises:
            ConfigError: the model cannot have them.
        """
        return cls(policy, config, add_adapters(policy.model, config.lora, seed=seed), base_path)

    def place(self, device: torch.device) -> AdapterWeights:
        """Move the policy to `device`, matrices with adapters in the precision of computation; return its weights."""
        round_bases(self._policy.model, DTYPES[self._config.dtype])
        self._weights = AdapterWeights(self._policy.to(device).model)
        num_trained = sum(parameter.numel() for parameter in self._weights.trained.values())
        log.info("adapters.added", num_layers=len(self._layers), num_trained=num_trained)
        return self._weights

    def load(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Continue, once placed, with the adapters of a checkpoint.

        Args:
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
        own = self._weights.shards
        with StoredTensors(folder) as stored, torch.no_grad():
            if other := sorted(own.keys() ^ {name.removeprefix(PREFIX) for name in stored.names}):
                raise ConfigError(
                    f"trainer.lora.targets: {folder} has adapters for other layers than the recipe, such as {other[0]}"
                    "; a run keeps them: restore them, or begin a new run with the model that `penstock export` writes"
                )
            for name, weight in own.items():
                weight.copy_(stored.rows(PREFIX + name, slice(None)))

    def pushed_digests(self, device: torch.device) -> dict[str, int]:
        """Return digests of the base as engines hold it, by name, of the kind that is fast on `device`.

        Only the first call reads the weights.
        """
        if not self._pushed_digests:
            dtype, kind = DTYPES[self._config.dtype], digest_kind(device)
            self._pushed_digests = {
                name: tensor_digest(weight.to(dtype), kind) for name, weight in frozen_weights(self._policy.model)
            }
        return self._pushed_digests

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
