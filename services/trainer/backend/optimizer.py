"""One optimizer step: groups in, new weights and metrics out.

Legend: G = samples of the batch, N = the policy's own tokens of a micro-batch.

Invariants: the step is the same however the batch is cut into micro-batches; groups of equal reward add nothing to the
gradient, but count in every denominator; weights change only by a finite gradient. A batch of nothing but such groups
leaves the weights and AdamW's averages as they are. Everything here blocks: call it from
a thread.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
import torch
import xxhash
from accelerate import Accelerator

from penstock.errors import ConfigError, UserError
from penstock.weights.digest import XXH3, tensor_digests
from services.trainer.algorithm.advantage import group_advantages
from services.trainer.algorithm.loss import policy_loss, token_weights
from services.trainer.algorithm.token_stats import TokenStats
from services.trainer.backend.model import PolicyModel
from services.trainer.backend.random_state import capture_random_state, restore_random_state
from services.trainer.batching.micro_batch import pad, plan_micro_batches
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.checkpoint.store import save_model
from services.trainer.config import BackendConfig

log = structlog.get_logger()

_STATE_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The batch, sample by sample."""

    sequences: list[TrainSequence]
    rewards_G: np.ndarray
    advantages_G: np.ndarray
    weights_G: np.ndarray


class PolicyOptimizer:
    """The policy, AdamW and the learning-rate schedule, on one device."""

    def __init__(self, policy: PolicyModel, config: BackendConfig) -> None:
        """Move the policy to its device and make the optimizer.

        Raises:
            ConfigError: the device is not there, or the process is one of several ranks.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: the trainer runs as one process for now; start it without "
                "torchrun or accelerate launch"
            )
        device = resolve_device(config.device)
        self.dtype: torch.dtype = resolve_dtype(config.dtype, device)
        """Of computation, and of the weights that are pushed."""
        self._config = config
        self._accelerator = Accelerator(
            cpu=device == "cpu", mixed_precision="bf16" if self.dtype is torch.bfloat16 else "no"
        )
        self.device: torch.device = self._accelerator.device
        self.policy = policy
        adamw = torch.optim.AdamW(
            _parameter_groups(policy, config.optimizer.weight_decay),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
        )
        self._model, self._adamw = self._accelerator.prepare(policy, adamw)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            adamw, lambda step: warmup_factor(step, config.optimizer.warmup_steps)
        )
        self._num_skipped_in_a_row = 0

    def step(self, groups: Sequence[TrainGroup], version: int) -> dict[str, float]:
        """Take one optimizer step over the whole batch.

        A loss or gradient that is not finite leaves weights, optimizer and schedule as they were; it is counted in the
        metrics (`skipped`) and logged.

        Args:
            groups: The batch, in an order that must be the same on a replay.
            version: The published version, which the policy has before the step.

        Returns:
            Metrics, by name.

        Raises:
            UserError: more than `max_skipped_steps` steps in a row were skipped.
        """
        started = time.perf_counter()
        rows = self._rows(groups)
        stats = TokenStats(self._config.loss, version)
        loss, num_padded = 0.0, 0
        has_gradient = rows.advantages_G != 0
        for chosen in (np.flatnonzero(has_gradient), np.flatnonzero(~has_gradient)):
            lengths = [len(rows.sequences[number]) for number in chosen]
            for plan in plan_micro_batches(lengths, self._config.micro_batch_tokens):
                numbers = [int(chosen[number]) for number in plan]
                num_padded += len(plan) * lengths[plan[0]]
                loss += self._micro_step(rows, numbers, stats)
        metrics = self._update(loss)
        duration_s = time.perf_counter() - started
        num_forward = sum(len(sequence) for sequence in rows.sequences)
        metrics |= self._describe(groups, rows, version) | stats.metrics()
        metrics |= {
            "loss": loss,
            "step_time_s": duration_s,
            "trained_tokens_per_s": num_forward / duration_s,
            "padding_fraction": 1 - num_forward / num_padded,
        }
        return metrics

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what an engine loads: every parameter under its checkpoint name, tied ones once, in `self.dtype`."""
        for name, parameter in self.policy.named_weights():
            yield name, parameter.to(self.dtype)

    def weights_digest(self) -> str:
        """Return one digest over name and value of every master weight: equal where all bits are equal."""
        digests = tensor_digests(self.policy.named_weights(), XXH3)
        text = "".join(f"{name}={digest:016x}\n" for name, digest in sorted(digests.items()))
        digest: str = xxhash.xxh3_64_hexdigest(text.encode())
        return digest

    def save(self, folder: Path, base_path: Path) -> None:
        """Write the model folder, and optimizer, schedule and random state beside it.

        Args:
            folder: The checkpoint that is being written.
            base_path: Where the policy was loaded from, for what a model folder holds beside weights.
        """
        save_model(self.policy.model, base_path, folder)
        torch.save(
            {
                "adamw": self._adamw.state_dict(),
                "schedule": self._schedule.state_dict(),
                "num_skipped_in_a_row": self._num_skipped_in_a_row,
                "random": capture_random_state(),
            },
            folder / _STATE_FILE,
        )

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, except the weights: make the policy itself from the checkpoint's model folder."""
        state = torch.load(folder / _STATE_FILE, map_location=self.device, weights_only=True)
        self._adamw.load_state_dict(state["adamw"])
        self._schedule.load_state_dict(state["schedule"])
        self._num_skipped_in_a_row = state["num_skipped_in_a_row"]
        restore_random_state(state["random"])

    def _rows(self, groups: Sequence[TrainGroup]) -> _Rows:
        sequences = [sequence for group in groups for sequence in group.sequences]
        rewards_G = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
        members_G = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
        return _Rows(
            sequences=sequences,
            rewards_G=rewards_G,
            advantages_G=group_advantages(rewards_G, members_G, kind=self._config.loss.advantage),
            weights_G=token_weights(
                np.array([sequence.num_own_tokens for sequence in sequences]), self._config.loss.aggregation
            ),
        )

    def _micro_step(self, rows: _Rows, numbers: list[int], stats: TokenStats) -> float:
        """Forward, and backward where there is a gradient; returns the micro-batch's share of the loss."""
        batch = pad(
            [rows.sequences[number] for number in numbers],
            rows.advantages_G[numbers].tolist(),
            rows.weights_G[numbers].tolist(),
        ).to(self.device)
        with torch.set_grad_enabled(bool(rows.advantages_G[numbers].any())):
            logprobs_N = self._model(batch)
            loss = policy_loss(
                logprobs_N, batch.engine_logprobs_N, batch.advantages_N, batch.weights_N, self._config.loss
            )
        if loss.requires_grad:
            self._accelerator.backward(loss)
        stats.add(
            logprobs_N.detach().float().cpu().numpy(),
            batch.engine_logprobs_N.cpu().numpy(),
            batch.advantages_N.cpu().numpy(),
            batch.versions_N.cpu().numpy(),
        )
        return float(loss.detach())

    def _update(self, loss: float) -> dict[str, float]:
        """Apply the gradient if it is finite, and forget it in any case."""
        clip = self._config.optimizer.grad_clip
        grad_norm = float(self._accelerator.clip_grad_norm_(self.policy.parameters(), clip))
        learning_rate = float(self._schedule.get_last_lr()[0])
        is_finite = bool(np.isfinite(loss) and np.isfinite(grad_norm))
        if is_finite:
            self._adamw.step()
            self._schedule.step()
            self._num_skipped_in_a_row = 0
        self._adamw.zero_grad(set_to_none=True)
        if not is_finite:
            self._num_skipped_in_a_row += 1
            log.warning("step.skipped", loss=loss, grad_norm=grad_norm, in_a_row=self._num_skipped_in_a_row)
            if self._num_skipped_in_a_row > self._config.optimizer.max_skipped_steps:
                raise UserError(
                    f"{self._num_skipped_in_a_row} steps in a row had loss {loss} and gradient norm {grad_norm}; the "
                    "weights are as they were before them. Lower trainer.optimizer.learning_rate or loss.tis_cap and "
                    "resume from the last checkpoint"
                )
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped": float(not is_finite)}

    @staticmethod
    def _describe(groups: Sequence[TrainGroup], rows: _Rows, version: int) -> dict[str, float]:
        staleness = np.array([version - group.oldest_version for group in groups])
        lengths = np.array([sequence.num_own_tokens for sequence in rows.sequences])
        judged_G = rows.rewards_G[~np.isnan(rows.rewards_G)]
        return {
            "reward_mean": float(judged_G.mean()) if len(judged_G) else 0.0,
            "reward_std": float(judged_G.std()) if len(judged_G) else 0.0,
            "num_groups": float(len(groups)),
            "num_groups_without_gradient": float(sum(_is_flat(group.rewards) for group in groups)),
            "num_samples": float(len(rows.sequences)),
            "sample_tokens_mean": float(lengths.mean()),
            "sample_tokens_max": float(lengths.max()),
            "staleness_mean": float(staleness.mean()),
            "staleness_max": float(staleness.max()),
        }


def _is_flat(rewards: Sequence[float]) -> bool:
    """Whether the judged samples of a group all got the same."""
    return len({reward for reward in rewards if not math.isnan(reward)}) <= 1


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the factor on the learning rate of optimizer step `step`, from 0: linear to 1, then constant."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """Return the device that `auto` means here.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("trainer.device is cuda, but torch finds no GPU; set it to auto or cpu")
    return "cuda" if has_cuda and device != "cpu" else "cpu"


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the dtype that `auto` means on `device`."""
    if dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _parameter_groups(policy: PolicyModel, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
