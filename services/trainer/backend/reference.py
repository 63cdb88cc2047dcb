"""The reference policy: frozen weights that the loss compares the policy with.

Legend: N = own tokens of a row.

Its weights wait in the host's memory. For one pass over the batch they are on the device beside the policy's, and the
policy's own module computes with them; no second model exists. It makes its pass before the policy's gradient, so its
copy is gone when activations need the room.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from services.trainer.algorithm.config import KlConfig
from services.trainer.batching.rows import PackedRow

_FILE = "reference.pt"


class ReferencePolicy:
    """A frozen copy of the policy, refreshed by the recipe."""

    def __init__(
        self, policy: torch.nn.Module, config: KlConfig, *, precision: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Begin with the policy's present weights.

        Args:
            policy: Returns `TokenLogprobs` of a row.
            config: When the reference follows the policy.
            precision: Context in which the policy computes.
        """
        self._policy = policy
        self._config = config
        self._precision = precision
        self._num_updates = 0
        self._weights = {name: _on_host(parameter) for name, parameter in policy.named_parameters()}

    def logprobs(self, rows: Iterable[PackedRow]) -> list[torch.Tensor]:
        """Return float32[N] on the host for each row."""
        devices = {name: parameter.device for name, parameter in self._policy.named_parameters()}
        weights = {name: weight.to(devices[name], non_blocking=True) for name, weight in self._weights.items()}
        compute = partial(torch.func.functional_call, self._policy, weights)
        with torch.no_grad(), self._precision():
            return [compute((row,)).logprobs_N.float().cpu() for row in rows]

    def count_update(self) -> None:
        """Take note of an optimizer step, after it; refresh the reference if it is time."""
        self._num_updates += 1
        if self._config.refresh == "never" or self._num_updates % self._config.refresh_every:
            return
        share = 1.0 if self._config.refresh == "copy" else self._config.ema_weight
        for name, parameter in self._policy.named_parameters():
            self._weights[name].lerp_(parameter.detach().to(self._weights[name].device), share)

    def save(self, folder: Path) -> None:
        """Write `reference.pt` into a checkpoint."""
        torch.save({"num_updates": self._num_updates, "weights": self._weights}, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read `reference.pt` from a checkpoint.

        Raises:
            ConfigError: the checkpoint is of a run without a reference.
        """
        if not (folder / _FILE).is_file():
            raise ConfigError(
                f"algorithm.kl.kind = {self._config.kind!r} needs a reference policy, but {folder} was saved without "
                "one; set algorithm.kl.kind = 'none', or begin a new run"
            )
        state: dict[str, Any] = torch.load(folder / _FILE, map_location="cpu", weights_only=True)
        self._num_updates = state["num_updates"]
        for name, weight in state["weights"].items():
            self._weights[name].copy_(weight)


def _on_host(parameter: torch.nn.Parameter) -> torch.Tensor:
    host = parameter.detach().to("cpu", copy=True)
    return host.pin_memory() if parameter.is_cuda else host
