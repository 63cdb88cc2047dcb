"""The state in a checkpoint: weights, the optimizer's averages, random state. Every kind of step uses it.

Invariant: `collect` returns the state after the last finished step.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.config.base import leaves
from penstock.errors import ConfigError, SetupError
from penstock.model.precision import resolve_dtype
from penstock.v1 import rollout_pb2
from penstock.weights.adapter_names import is_adapter
from penstock.weights.adapters import ADAPTER_DTYPE
from penstock.weights.digest import XXH3, tensor_digests
from services.trainer.backend.base import StateDigests
from services.trainer.backend.device import DTYPES, peak_tflops, resolve_device
from services.trainer.backend.files.adapter_folder import ADAPTER, STEM
from services.trainer.backend.files.adapter_state import AdapterState, require_kind
from services.trainer.backend.files.checkpoint_share import MODEL, STATE_FILE, Collected, Owning, write_collected
from services.trainer.backend.files.export import combined_digest, named_weights
from services.trainer.backend.files.pushed_precision import precisions
from services.trainer.backend.files.random_state import capture_random_state, random_state_digest, restore_random_state
from services.trainer.backend.files.tensor_files import StoredTensors
from services.trainer.backend.files.weight_placement import WeightPlacement
from services.trainer.backend.optimizer.adamw import ADAM_EPS, MAX_SKIPPED_STEPS, Optimizer
from services.trainer.backend.optimizer.master_weights import MasterWeights
from services.trainer.backend.policy.adapters import pushed_adapters
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.logprobs import TokenLogprobs
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.model_flops import model_flops
from services.trainer.backend.policy.relative_costs import relative_costs
from services.trainer.backend.ranks.pushed_rows import write_rows
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.ranks.sharding import forget_gathered
from services.trainer.backend.step_work import Arithmetic
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.rows import PackedRow
from services.trainer.checks.parameter_patterns import rates_of
from services.trainer.config import BackendConfig

log = structlog.get_logger()

_OPTIMIZER = "optimizer"
"""Folder of AdamW's averages, `<weight>.exp_avg` and `<weight>.exp_avg_sq`."""


class ModelState:
    """A model on one device, or this rank's share of it, with its optimizer."""

    policy: PolicyModel
    weights: MasterWeights
    optimizer: Optimizer
    row_costs: RowCosts
    arithmetic: Arithmetic
    adapters: AdapterState | None
    """None: all weights are trained."""

    def __init__(
        self,
        model_path: Path,
        config: BackendConfig,
        *,
        seed: int,
        temperature: float,
        forbidden_ids: tuple[int, ...],
        settings: Mapping[str, Any],
        adam_eps: float = ADAM_EPS,
        max_skipped_steps: int = MAX_SKIPPED_STEPS,
        hsdp_replicas: int = 1,
        expert_parallel: int = 1,
        sequence_parallel: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        """Choose device and precision; `load` creates policy, weights and optimizer.

        Args:
            model_path: Model folder that the run begins with; its tokenizer and processor go into every checkpoint.
            config: How steps are computed.
            seed: Seed of torch's generator, in a run that starts from `model_path`.
            temperature: Divides the logits.
            forbidden_ids: Ids without probability.
            settings: Settings besides `config` that affect a step's numbers, by their names in a recipe, as plain data.
            adam_eps: Added to AdamW's denominator.
            max_skipped_steps: More skipped steps in a row than this are an error.
            hsdp_replicas: Groups of ranks that each hold shards of all weights; it divides the number of ranks.
            expert_parallel: Ranks among which the experts of a layer are divided; it divides the number of ranks.
            sequence_parallel: Ranks that compute each row together; it divides the number of ranks.
            ranks: The ranks that hold a share of the model.

        Raises:
            ConfigError: the device does not exist, or there are several ranks and compiled layers.
        """
        if config.compile and ranks.size > 1:  # torchrun may have started more than trainer.ranks
            raise ConfigError(f"trainer.compile = true does not go with {ranks.size} ranks yet; leave it out")
        self.ranks = ranks.replicated(hsdp_replicas).sharing_rows(sequence_parallel)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, on_gpu=device == "cuda")
        own = {name: getattr(config, name) for name in BackendConfig.model_fields}
        self.config = BackendConfig(**{**own, "device": device, "dtype": dtype})
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self._model_path = model_path
        self._seed = seed
        self._temperature = temperature
        self._forbidden_ids = forbidden_ids
        self._settings = {**settings, **leaves("trainer", self.config.model_dump(mode="json"))}
        self._adam_eps = adam_eps
        self._max_skipped_steps = max_skipped_steps
        self._expert_parallel = expert_parallel

    def load(self, checkpoint: Path | None) -> Mapping[str, Any]:
        """Load a checkpoint, or with None the model folder; return the checkpoint's state, with `collect`'s `further`.

        Raises:
            ConfigError: the folder holds no loadable model, or checkpoint and recipe differ in their adapters: only one
                of them has any, or they have different ones.
            SetupError: the checkpoint is not there, an earlier version of Penstock wrote it, or the base of its
                adapters has changed. What fails on one rank alone fails on all, with the number of that rank.
        """
        torch.manual_seed(self._seed)
        lora = self.config.lora
        folder = self._model_path if checkpoint is None or lora.rank else checkpoint / MODEL
        self.policy = self.ranks.on_each(partial(self._read_policy, folder, checkpoint))
        self.row_costs = relative_costs(self.policy.model)
        self.adapters = None
        if lora.rank:
            self.adapters = AdapterState(self.policy, self.config, base_path=self._model_path)
        rates = self._choose_trained()
        self.arithmetic = Arithmetic(
            flops=model_flops(self.policy.model),
            peak_tflops=peak_tflops(self.device, DTYPES[self.config.dtype]),
        )
        self.weights = WeightPlacement(
            policy=self.policy,
            adapters=self.adapters,
            folder=folder,
            config=self.config,
            device=self.device,
            seed=self._seed,
            ranks=self.ranks,
            expert_parallel=self._expert_parallel,
        ).place()
        self.optimizer = Optimizer(
            self.weights,
            rates,
            self.config.optimizer,
            num_updates=self.config.num_steps,
            is_fused=self.device.type == "cuda",
            eps=self._adam_eps,
            max_skipped_steps=self._max_skipped_steps,
            ranks=self.ranks,
        )
        state: Mapping[str, Any] = {}
        if checkpoint is not None:
            state = self.ranks.on_each(partial(self._resume, checkpoint))
        self.finish_step()
        return state

    def _read_policy(self, folder: Path, checkpoint: Path | None) -> PolicyModel:
        """Return the policy; beside other ranks without weights, of which each reads its shards later."""
        lora = self.config.lora
        if checkpoint is not None and not (checkpoint / STATE_FILE).is_file():
            if not checkpoint.is_dir():
                raise SetupError(
                    f"{checkpoint} is not there: run.dir, or run.folder, must be a folder that all machines share"
                )
            raise SetupError(
                f"{checkpoint} has no {STATE_FILE}: an earlier version of Penstock wrote it, and it cannot be resumed; "
                f"begin a new run with --model.path={checkpoint / MODEL}"
            )
        if checkpoint is not None:
            require_kind(checkpoint, lora)
        return load_policy(
            folder,
            temperature=self._temperature,
            forbidden_ids=self._forbidden_ids,
            float32_head=self.config.float32_head,
            gradient_checkpointing=self.config.gradient_checkpointing,
            is_compiled=self.config.compile,
            with_weights=self.ranks.size == 1,
        )

    def _resume(self, checkpoint: Path) -> Mapping[str, Any]:
        state: Mapping[str, Any] = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        self._log_changes(state["settings"])
        if self.adapters is not None:
            self.adapters.load(self.weights, state, checkpoint)
        self._load_optimizer(state["optimizer"], checkpoint)
        restore_random_state(state["random"])
        return state

    def finish_step(self) -> None:
        """Save the current random state for `collect`, because the next step may draw."""
        self._random_state = capture_random_state()

    def precision(self) -> torch.autocast:
        """Return a context that computes in the configured precision, also with float32 weights, as adapters have."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def logprobs(self, row: PackedRow) -> TokenLogprobs:
        """Return what the policy says of its own tokens in a row, with gradient."""
        with self.precision():
            logprobs: TokenLogprobs = self.policy(row)
        return logprobs

    def plain_logprobs(self, row: PackedRow) -> TokenLogprobs:
        """Return what the model says of a row's learned tokens at temperature 1 and over all ids, with gradient."""
        with self.precision():
            logprobs: TokenLogprobs = self.policy(row, is_sampled=False)
        return logprobs

    def forget_forward(self) -> None:
        """Release gathered weights: no backward pass follows the forward passes so far."""
        if self.ranks.size > 1:
            forget_gathered(self.policy)

    def collect(self, further: Mapping[str, Any], shards: Mapping[str, Mapping[str, torch.Tensor]]) -> Collected:
        """Return this rank's share for `write`. Beside other ranks it is a copy, and all must call this together.

        Args:
            further: Plain data and small tensors that `load` returns.
            shards: By the name of a folder, this rank's shards of further tensors that are shaped like the weights, by
                weight.
        """
        state = self.optimizer.state_dict()
        averages: dict[str, dict[str, torch.Tensor]] = {}
        counters: dict[str, dict[str, torch.Tensor]] = {}
        for name, values in state["averages"].items():
            for kind, value in values.items():
                if value.ndim:
                    averages.setdefault(kind, {})[name] = value
                else:
                    counters.setdefault(name, {})[kind] = value.clone()
        if self.adapters is None:
            owning = Owning.of(self.weights, self.ranks)
            tensors = {MODEL: owning.share("model", {"": self.weights.shards})}
        else:
            owning = Owning.of_one(self.weights, rank=0)
            # PEFT reads adapters from one file.
            tensors = {ADAPTER: owning.share(STEM, {"": self.weights.shards}, is_one_file=True)}
        if averages:
            tensors[_OPTIMIZER] = owning.share("averages", averages)
        tensors |= {folder: owning.share(folder, {"": each}) for folder, each in shards.items()}
        return Collected(
            tensors=tensors,
            state={
                **further,
                "optimizer": state | {"averages": counters},
                "random": self._random_state,
                "settings": self._settings,
                "base": self._base_digest,
            },
            adapter_config=None if self.adapters is None else self.adapters.described(),
        )

    def write(self, collected: Collected, folder: Path) -> dict[str, str]:
        """Write this rank's share into `folder`, which must exist; return the digests of its files, which are on disk.

        Raises:
            OSError: a file cannot be written.
        """
        return write_collected(
            collected,
            folder,
            rank=self.ranks.rank,
            base_path=self._model_path,
            model_type=self.policy.model.config.model_type,
        )

    def write_rows(self, memory: rollout_pb2.SharedMemorySource, offsets: Mapping[str, int]) -> None:
        """Write this rank's rows of what is pushed into memory of rank 0's process; see `pushed_rows`."""
        if self.adapters is None:
            weights, dtype = dict(named_weights(self.policy)), DTYPES[self.config.dtype]
        else:
            weights = {spec.name: tensor for spec, tensor in pushed_adapters(self.policy.model)}
            dtype = DTYPES[ADAPTER_DTYPE]
        model_type = self.policy.model.config.model_type
        write_rows(
            weights,
            memory,
            offsets,
            precisions=precisions(weights, model_type, dtype),
            ranks=self.ranks,
            groups=self.ranks.expert_groups(self._expert_parallel),
        )

    def read_shards(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's shards of what `collect` got for a folder of a checkpoint, each with its weight's name."""
        with StoredTensors(folder) as stored:
            for name in stored.names:
                yield name, self._read(stored, name, weight=name)

    def _load_optimizer(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        averages: dict[str, dict[str, torch.Tensor]] = {
            name: dict(counters) for name, counters in state["averages"].items()
        }
        if averages:
            with StoredTensors(checkpoint / _OPTIMIZER) as stored:
                trained = self.weights.trained
                for name in stored.names:
                    weight, _, kind = name.rpartition(".")
                    if weight in trained:  # each goes to its device at once: a host may not hold all of them
                        average = self._read(stored, name, weight=weight)
                        averages[weight][kind] = average.to(trained[weight].device)
        self.optimizer.load_state_dict({**state, "averages": averages})

    def _read(self, stored: StoredTensors, name: str, *, weight: str) -> torch.Tensor:
        return self.weights.read_shard(weight, partial(stored.rows, name))

    def digests(self) -> StateDigests:
        """Return digests of the current weights and random state."""
        digests = tensor_digests(self.weights.named(), XXH3)
        return StateDigests(
            weights=combined_digest(digests, base=self._base_digest), random_state=random_state_digest()
        )

    @property
    def _base_digest(self) -> str:
        return "" if self.adapters is None else self.adapters.base_digest

    def _choose_trained(self) -> dict[str, float]:
        """Freeze parameters with a learning rate of 0; return the rates by name."""
        optimizer = self.config.optimizer
        parameters = dict(self.policy.model.named_parameters())
        if self.adapters is not None:
            parameters = {name: parameter for name, parameter in parameters.items() if is_adapter(name)}
        rates = rates_of(list(parameters), optimizer.learning_rates, default=optimizer.learning_rate)
        for name, parameter in parameters.items():
            parameter.requires_grad_(rates[name] > 0)
        if num_frozen := sum(p.numel() for name, p in parameters.items() if not rates[name]):
            num_in_all = sum(parameter.numel() for parameter in parameters.values())
            log.info("weights.frozen", num_frozen=num_frozen, num_trained=num_in_all - num_frozen)
        return rates

    def _log_changes(self, saved: Mapping[str, Any]) -> None:
        """Log the settings that differ from the checkpoint's; the recipe's settings apply after a resume."""
        for name in sorted({*self._settings, *saved}):
            before, value = saved.get(name), self._settings.get(name)
            if before != value:
                log.info("setting.changed", setting=name, checkpoint=before, recipe=value)
