"""The backend of one rank, in the trainer's own process."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.config.base import leaves
from penstock.errors import ConfigError
from penstock.model.tokens import forbidden_token_ids
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.plugin import require_functions
from services.trainer.algorithm.regularisers import EntropyCoefficient
from services.trainer.backend.base import StateDigests
from services.trainer.backend.device import DTYPES, resolve_device, resolve_dtype
from services.trainer.backend.environment import Environment, current_environment
from services.trainer.backend.export import named_weights, save_model, weights_digest
from services.trainer.backend.learning_rates import rates_of
from services.trainer.backend.master_weights import HostMasterWeights, MasterWeights
from services.trainer.backend.memory import memory_peaks, reset_memory_peak
from services.trainer.backend.optimizer import ADAM_EPS, MAX_SKIPPED_STEPS, Optimizer
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.reference import ReferencePolicy
from services.trainer.backend.random_state import capture_random_state, random_state_digest, restore_random_state
from services.trainer.backend.tensor_files import save_state
from services.trainer.backend.train_step import StepParts, TrainStep
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig

log = structlog.get_logger()

_STATE_FILE = "optimizer.pt"


class InProcessBackend:
    """A `TrainBackend` on one device."""

    policy: PolicyModel
    """The model; there after `load`."""

    def __init__(
        self,
        model_path: Path,
        config: BackendConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        temperature: float,
        adam_eps: float = ADAM_EPS,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
    ) -> None:
        """Choose device and precision; `load` makes the rest.

        Args:
            model_path: Model folder that the run begins with; its tokenizer and processor go into every checkpoint.
            config: How steps are computed.
            algorithm: What they compute.
            seed: Of torch's generator, in a run that starts from `model_path`.
            temperature: Of the sampling that is trained.
            adam_eps: Added to AdamW's denominator.
            max_skipped_steps: More steps in a row than this whose loss or gradient is not finite are an error.

        Raises:
            ConfigError: the device is not there, the process is one of several ranks, or a function of the algorithm
                cannot be imported.
        """
        require_functions(algorithm)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the trainer runs as one process; start it without "
                "torchrun or accelerate launch"
            )
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        own = {name: getattr(config, name) for name in BackendConfig.model_fields}
        self._config = BackendConfig(**{**own, "device": device, "dtype": dtype})
        self._algorithm = algorithm
        self._model_path = model_path
        self._seed = seed
        self._temperature = temperature
        self._adam_eps = adam_eps
        self._max_skipped_steps = max_skipped_steps
        self._step: TrainStep | None = None
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""
        return self._config

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model folder; see `TrainBackend.load`."""
        torch.manual_seed(self._seed)
        self.policy = load_policy(
            self._model_path if checkpoint is None else checkpoint / "model",
            temperature=self._temperature,
            forbidden_ids=forbidden_token_ids(self._model_path),
            float32_head=self._config.float32_head,
            gradient_checkpointing=self._config.gradient_checkpointing,
        )
        rates = self._choose_trained()
        self._weights = self._place_weights()
        self._optimizer = Optimizer(
            self._weights,
            rates,
            self._config.optimizer,
            num_updates=self._config.num_steps,
            is_fused=self._device.type == "cuda",
            eps=self._adam_eps,
            max_skipped_steps=self._max_skipped_steps,
        )
        self._entropy = EntropyCoefficient(self._algorithm.entropy)
        self._reference = None
        if self._algorithm.needs_reference:
            self._reference = ReferencePolicy(self.policy, self._weights, self._algorithm.kl, precision=self._precision)
        self._parts = StepParts(
            model=self._logprobs,
            optimizer=self._optimizer,
            reference=self._reference,
            entropy=self._entropy,
            device=self._device,
            config=self._config,
            algorithm=self._algorithm,
        )
        if checkpoint is not None:
            state = torch.load(checkpoint / _STATE_FILE, map_location="cpu", weights_only=True)
            self._log_changes(state["settings"])
            self._optimizer.load_state_dict(state["optimizer"])
            restore_random_state(state["random"])
            if "entropy" in state:
                self._entropy.load_state_dict(state["entropy"])
            if self._reference is not None:
                self._reference.load(checkpoint)
        self._random_state = capture_random_state()  # of the moment that `save` writes; a step may draw

    def _choose_trained(self) -> dict[str, float]:
        """Freeze what has a learning rate of 0; return the rates by name."""
        parameters = dict(self.policy.model.named_parameters())
        optimizer = self._config.optimizer
        rates = rates_of(list(parameters), optimizer.learning_rates, default=optimizer.learning_rate)
        for name, parameter in parameters.items():
            parameter.requires_grad_(rates[name] > 0)
        if num_frozen := sum(p.numel() for name, p in parameters.items() if not rates[name]):
            log.info(
                "weights.frozen", num_frozen=num_frozen, num_trained=self.policy.model.num_parameters() - num_frozen
            )
        return rates

    def _place_weights(self) -> MasterWeights:
        if not self._config.optimizer.offload:
            return MasterWeights(self.policy.to(self._device).model)
        weights = HostMasterWeights(self.policy.model, device=self._device, dtype=DTYPES[self._config.dtype])
        self.policy.to(self._device)  # the buffers, which keep their precision
        return weights

    def begin_step(self, policy_version: int) -> None:
        """Begin an optimizer step; see `TrainBackend.begin_step`."""
        if self._step is not None:
            raise ValueError("the step before is neither finished nor aborted")
        reset_memory_peak(self._device)
        self._step = TrainStep(self._parts, policy_version)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add groups to the step's batch; see `TrainBackend.accumulate`."""
        self._open_step().accumulate(groups)

    def finish_step(self) -> dict[str, float]:
        """Update the weights; see `TrainBackend.finish_step`."""
        metrics = self._open_step().finish() | memory_peaks(self._device)
        self._step = None
        self._random_state = capture_random_state()
        return metrics

    def abort_step(self) -> None:
        """Leave out a step that was begun."""
        self._open_step().abort()
        self._step = None

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise ValueError("no step was begun")
        return self._step

    def _precision(self) -> torch.autocast:
        """Compute in the configured precision; the weights stay float32."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16")

    def _logprobs(self, *inputs: Any) -> TokenLogprobs:
        with self._precision():
            logprobs: TokenLogprobs = self.policy(*inputs)
        return logprobs

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what an engine loads; see `TrainBackend.export`."""
        dtype = DTYPES[self._config.dtype]
        for name, parameter in named_weights(self.policy):
            yield name, parameter.to(dtype)

    def save(self, folder: Path) -> None:
        """Write `model/`, `optimizer.pt` and where there is one the reference policy into `folder`.

        Raises:
            OSError: a file cannot be written.
        """
        save_model(self.policy, self._weights, self._model_path, folder)
        state = {
            "optimizer": self._optimizer.state_dict(),
            "entropy": self._entropy.state_dict(),
            "random": self._random_state,
            "settings": self._settings(),
        }
        save_state(state, folder / _STATE_FILE)
        if self._reference is not None:
            self._reference.save(folder)

    def digests(self) -> StateDigests:
        """Return digests of the present weights and random state."""
        return StateDigests(weights=weights_digest(self._weights), random_state=random_state_digest())

    def environment(self) -> Environment:
        """Return what the numbers depend on beside the inputs."""
        return current_environment(self._device)

    def _settings(self) -> dict[str, Any]:
        """Every setting of a step by its name in a recipe, as plain data."""
        return {
            "sampling.temperature": self._temperature,
            **leaves("trainer", self._config.model_dump(mode="json")),
            **leaves("algorithm", self._algorithm.model_dump(mode="json")),
        }

    def _log_changes(self, saved: dict[str, Any]) -> None:
        """The recipe's settings hold after a resume; say which the checkpoint was trained with."""
        settings = self._settings()
        for name in sorted({*settings, *saved}):
            before, value = saved.get(name), settings.get(name)
            if before != value:
                log.info("setting.changed", setting=name, checkpoint=before, recipe=value)
