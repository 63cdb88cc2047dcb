"""The backend of one rank, in its own process: alone, or for its part of every step beside other ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.base import leaves
from penstock.errors import ConfigError
from penstock.model.families.linear_attention import has_linear_attention
from penstock.model.tokens import forbidden_token_ids
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import TensorSpec
from penstock.weights.named_weights import NamedWeights
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.plugin import require_functions
from services.trainer.algorithm.regularisers import EntropyCoefficient
from services.trainer.backend.base import Measure, StateDigests, StepTokens
from services.trainer.backend.demonstrations import DemonstrationTerm
from services.trainer.backend.device import DTYPES
from services.trainer.backend.environment import Environment, current_environment
from services.trainer.backend.files.adapter_state import AdapterState
from services.trainer.backend.files.checkpoint_share import Collected
from services.trainer.backend.files.export import named_weights
from services.trainer.backend.files.model_state import ModelState
from services.trainer.backend.files.pushed_precision import precisions
from services.trainer.backend.memory import has_room_to_spare, highest, memory_peaks, reset_memory_peak
from services.trainer.backend.optimizer.adamw import ADAM_EPS, MAX_SKIPPED_STEPS
from services.trainer.backend.policy.adapters import pushed_adapters
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.reference import ReferencePolicy
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.row_passes import RowPasses
from services.trainer.backend.train_step import StepParts, TrainStep
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.checks.adapters import adapter_contradiction, require_adaptable
from services.trainer.checks.model_type import require_trained_type
from services.trainer.config import BackendConfig

_REFERENCE = "reference"
"""Name of the reference policy's folder in a checkpoint, and of its counters."""


class InProcessBackend:
    """A `TrainBackend` on one device.

    With several ranks, call each method on all of them, with the same arguments, in the same order.
    """

    def __init__(
        self,
        model_path: Path,
        config: BackendConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        temperature: float,
        demonstration_coef: float | None = None,
        adam_eps: float = ADAM_EPS,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        hsdp_replicas: int = 1,
        expert_parallel: int = 1,
        sequence_parallel: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        """Choose device and precision; `load` makes the rest.

        Args:
            model_path: Model folder that the run begins with; its tokenizer and processor go into every checkpoint.
            config: How steps are computed.
            algorithm: What they compute.
            seed: Of torch's generator, in a run that starts from `model_path`.
            temperature: Of the sampling that is trained.
            demonstration_coef: `demonstrations.coef`; None: no step has any.
            adam_eps: Added to AdamW's denominator.
            max_skipped_steps: More steps in a row than this whose loss or gradient is not finite are an error.
            hsdp_replicas: Groups of ranks that each hold shards of all weights.
            expert_parallel: Ranks among which the experts of a layer are divided.
            sequence_parallel: Ranks that compute each row together.
            ranks: All that compute.

        Raises:
            ConfigError: the model's type is not trained, the device is not there, a function of the algorithm cannot
                be imported, or settings exclude each other.
        """
        require_trained_type(model_path)
        require_functions(algorithm)
        if reason := adapter_contradiction(config.lora, algorithm.kl):
            raise ConfigError(reason)
        require_adaptable(config.lora, attends_linearly=has_linear_attention(model_path))
        self._algorithm = algorithm
        self._demonstration_coef = demonstration_coef
        learned = {} if demonstration_coef is None else {"demonstrations.coef": demonstration_coef}
        self._model = ModelState(
            model_path,
            config,
            seed=seed,
            temperature=temperature,
            forbidden_ids=forbidden_token_ids(model_path),
            settings={
                "sampling.temperature": temperature,
                **leaves("algorithm", algorithm.model_dump(mode="json")),
                **learned,
            },
            adam_eps=adam_eps,
            max_skipped_steps=max_skipped_steps,
            hsdp_replicas=hsdp_replicas,
            expert_parallel=expert_parallel,
            sequence_parallel=sequence_parallel,
            ranks=ranks,
        )
        self._step: TrainStep | None = None
        self._tokens: StepTokens | None = None

    @property
    def config(self) -> BackendConfig:
        """The settings in use, with device and dtype resolved."""
        return self._model.config

    @property
    def policy(self) -> PolicyModel:
        """The model; there after `load`."""
        return self._model.policy

    def load(self, checkpoint: Path | None) -> None:
        """Load a checkpoint, or with None the model folder; see `TrainBackend.load`."""
        model = self._model
        state = model.load(checkpoint)
        self._entropy = EntropyCoefficient(self._algorithm.entropy)
        if "entropy" in state:
            self._entropy.load_state_dict(state["entropy"])
        self._reference = None
        if self._algorithm.needs_reference:
            self._reference = ReferencePolicy(
                model.policy, model.weights, self._algorithm.kl, precision=model.precision
            )
            model.ranks.on_each(partial(self._fill_reference, self._reference, checkpoint, state))
        passes = RowPasses(
            model=model.logprobs,
            forget_forward=model.forget_forward,
            ranks=model.ranks,
            costs=model.row_costs,
            reference=self._reference,
            device=model.device,
            config=model.config,
            algorithm=self._algorithm,
        )
        self._parts = StepParts(
            passes=passes,
            arithmetic=model.arithmetic,
            optimizer=model.optimizer,
            entropy=self._entropy,
            demonstrations=self._demonstration_term(),
        )

    def _fill_reference(self, reference: ReferencePolicy, checkpoint: Path | None, state: Mapping[str, Any]) -> None:
        teacher = self._algorithm.kl.reference
        saved = state.get("settings", {}).get("algorithm.kl.reference")
        if checkpoint is None or (teacher is not None and str(teacher) != saved):
            if teacher is not None:
                reference.read_model(teacher)
            return
        if teacher is None and saved is not None:
            raise ConfigError(
                f"algorithm.kl.reference is not set, but the reference policy of {checkpoint} is the model {saved}; "
                "set it to that, or begin a new run"
            )
        if _REFERENCE not in state:
            raise ConfigError(
                f"algorithm.kl.kind = {self._algorithm.kl.kind!r} needs a reference policy, but {checkpoint} was saved "
                "without one; set algorithm.kl.kind = 'none', or begin a new run"
            )
        reference.load_state_dict(state[_REFERENCE], self._model.read_shards(checkpoint / _REFERENCE))

    def _demonstration_term(self) -> DemonstrationTerm | None:
        if self._demonstration_coef is None:
            return None
        return DemonstrationTerm(
            model=self._model.plain_logprobs,
            coef=self._demonstration_coef,
            config=self._model.config,
            device=self._model.device,
            ranks=self._model.ranks,
            costs=self._model.row_costs,
        )

    def begin_step(self, policy_version: int) -> None:
        """Begin an optimizer step; see `TrainBackend.begin_step`."""
        if self._step is not None:
            raise ValueError("the step before is neither finished nor aborted")
        reset_memory_peak(self._model.device)
        self._tokens = None
        self._step = TrainStep(self._parts, policy_version)

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add groups to the step's batch; see `TrainBackend.accumulate`."""
        self._open_step().accumulate(groups)

    def add_demonstrations(self, sequences: Sequence[TrainSequence]) -> None:
        """Have the step learn demonstrations too; see `TrainBackend.add_demonstrations`.

        Raises:
            ValueError: the step has some already, or there is no factor for them.
        """
        self._open_step().add_demonstrations(sequences)

    def finish_step(self) -> Measure:
        """Update the weights; see `TrainBackend.finish_step`."""
        step = self._open_step()
        measure = step.finish()
        peaks = highest(self._model.ranks.gather(memory_peaks(self._model.device)))
        self._tokens, self._step = step.tokens, None
        self._model.finish_step()
        return lambda: measure() | peaks

    def step_tokens(self) -> StepTokens | None:
        """Return the tokens of the step that was finished last; see `TrainBackend.step_tokens`."""
        return self._tokens

    def abort_step(self) -> None:
        """Leave out a step that was begun."""
        self._open_step().abort()
        self._step = None

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise ValueError("no step was begun")
        return self._step

    def export(self) -> NamedWeights:
        """Return what an engine loads; see `TrainBackend.export`."""
        if self._model.adapters is not None:
            return self._export_adapters(self._model.adapters)
        masters, weights = self._model.weights, dict(named_weights(self.policy))
        pushed = precisions(weights, self.policy.model.config.model_type, DTYPES[self.config.dtype])
        return NamedWeights(
            specs=tuple(
                TensorSpec(name=name, dtype=pushed[name].written_name, shape=masters.full_shape(weight))
                for name, weight in weights.items()
            ),
            device=self._model.device,
            tensors=((name, masters.full_tensor(pushed[name].apply(weight))) for name, weight in weights.items()),
        )

    def write_weights(self, memory: rollout_pb2.SharedMemorySource, offsets: Mapping[str, int]) -> None:
        """Write this rank's rows of what `export` returns into memory of rank 0's process.

        Args:
            memory: The memory, of the host.
            offsets: Where each weight begins, in bytes.

        Raises:
            OSError: this rank could not write.
            RuntimeError: another rank could not.
        """
        self._model.write_rows(memory, offsets)

    def _export_adapters(self, state: AdapterState) -> NamedWeights:
        adapters, masters = list(pushed_adapters(self.policy.model)), self._model.weights
        return NamedWeights(
            specs=tuple(spec for spec, _ in adapters),
            device=self._model.device,
            tensors=((spec.name, masters.full_tensor(tensor)) for spec, tensor in adapters),
            base_digests=state.pushed_digests,
        )

    def save(self, folder: Path, *, on_copied: Callable[[], object] | None = None) -> Mapping[str, str]:
        """Write a checkpoint; see `TrainBackend.save`. Its weights are copied if somebody waits to change them, and the
        host's memory has room to spare.

        Raises:
            OSError: a file cannot be written.
        """
        collected = self.collect()
        if on_copied is not None and has_room_to_spare(collected.size_bytes):
            collected = collected.copied()
            on_copied()
            return self.write(collected, folder)
        digests = self.write(collected, folder)
        if on_copied is not None:
            on_copied()
        return digests

    def collect(self) -> Collected:
        """Return what `write` writes. Beside other ranks it is a copy of this rank's share."""
        further: dict[str, Any] = {"entropy": self._entropy.state_dict()}
        if self._reference is None:
            return self._model.collect(further, {})
        further[_REFERENCE] = self._reference.state_dict()
        return self._model.collect(further, {_REFERENCE: self._reference.shards})

    def write(self, collected: Collected, folder: Path) -> Mapping[str, str]:
        """Write this rank's share into `folder`; return the digests of its files, which are on disk, by their paths.

        Raises:
            OSError: a file cannot be written.
        """
        return self._model.write(collected, folder)

    def digests(self) -> StateDigests:
        """Return digests of the present weights and random state."""
        return self._model.digests()

    def environment(self) -> Environment:
        """Return what the numbers depend on beside the inputs."""
        return current_environment(self._model.device, num_ranks=self._model.ranks.size)

    def close(self) -> None:
        """Nothing computes beside this process."""
