"""Tells whose rounding |dlogp| is: compares engine, trainer and transformers with the same weights in float64.

    python bench/trainer/bench_rounding.py --run runs/tiny-multi-turn-20260101-120000
    python bench/trainer/bench_rounding.py --recipe recipes/tiny-multi-turn.toml -- --trainer.num_steps=20

Without --run it trains the recipe with `max_staleness = 0`, so that every token was sampled by the very weights that
are then trained, and keeps groups and checkpoints of all steps. A given run must have kept them too
(`trainer.record_groups`, `trainer.checkpoint_every = 1`, `trainer.keep_checkpoints`); its older tokens are left out.

The reference is transformers' model with every product, sum, norm and rotation in float64. Rotary angles stay float32:
they are part of the model, and equal on both sides. "transformers" is the model as published, in float32, one sequence
at a time with its own attention: a third computation that shares no code with the other two.
"""

import argparse
import copy
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.demo.penstock_run import run_to_end
from bench.support.termination import exit_on_sigterm
from penstock.model.tokens import forbidden_token_ids
from services.trainer.admission.filters import screen
from services.trainer.backend.policy.load_model import load_policy
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.sequences import TrainSequence, open_reader
from services.trainer.replay.recording import Recording, recorded_steps
from services.trainer.replay.run import RecordedRun

BOUNDS = (0.0, 1.0, 3.0, 6.0, np.inf)
"""Of -logp, for the table by probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Log-probabilities of the policy's own tokens of a step; N = tokens."""

    exact_N: np.ndarray
    """In float64."""
    engine_N: np.ndarray
    trainer_N: np.ndarray
    transformers_N: np.ndarray
    turn_N: np.ndarray
    """Turn of each token, from 0."""

    @staticmethod
    def joined(parts: Sequence["Measured"]) -> "Measured":
        """Join the tokens of several steps."""
        names = Measured.__dataclass_fields__
        return Measured(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def main() -> int:
    """Return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny-multi-turn.toml")
    parser.add_argument("--run", type=Path, help="folder of a finished run; default: train the recipe")
    parser.add_argument("--every", type=int, default=3, metavar="N", help="measure every Nth recorded step")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments.run or train(arguments.recipe, Path(scratch) / "run", arguments.overrides)
        parts = list(measured_steps(RecordedRun(run), arguments.every))
    everything = Measured.joined(parts)
    print_errors(everything)
    print_parts(everything)
    return 0


def train(recipe: str, folder: Path, overrides: Sequence[str]) -> Path:
    """Train, and return the run folder."""
    kept = ["--trainer.record_groups=true", "--trainer.checkpoint_every=1", "--trainer.keep_checkpoints=1000"]
    run_to_end("train", recipe, f"--run.folder={folder}", "--trainer.max_staleness=0", *kept, *overrides)
    return folder


def measured_steps(run: RecordedRun, every: int) -> Iterator[Measured]:
    """Measure every `every`th recorded step whose checkpoint was kept."""
    for step in recorded_steps(run.groups)[::every]:
        recording = run.recording(step)
        start = run.checkpoint_before(step)
        if start is None and step == 1:
            measured = measure(recording, recording.settings.model.path)
        elif start is not None and start.step == step - 1:
            measured = measure(recording, start.model_path)
        else:
            continue
        worst = {name: f"{np.abs(values - measured.exact_N).max():.1e}" for name, values in _sides(measured)}
        sys.stdout.write(f"step {step}: {len(measured.exact_N)} tokens, largest error {worst}\n")
        sys.stdout.flush()
        yield measured


def measure(recording: Recording, model_path: Path) -> Measured:
    """Compute the log-probabilities of a step's own tokens of its own version, with the weights that sampled them."""
    settings, version = recording.settings, recording.inputs.policy_version
    reader = open_reader(model_path)
    groups = [
        reader.read(group, recording.images).screened(screening)
        for group in recording.groups
        if not (screening := screen(group, settings.filters)).reason
    ]
    sequences = [sequence for group in groups for sequence in group.sequences]
    group_of = [number for number, group in enumerate(groups) for _ in group.sequences]
    own = [sequence.loss_mask_X for sequence in sequences]
    engine_N, version_N = (
        np.concatenate([getattr(sequence, name)[mask] for sequence, mask in zip(sequences, own, strict=True)])
        for name in ("engine_logprobs_X", "versions_X")
    )
    policy = load_policy(
        model_path,
        temperature=settings.sampling.temperature,
        forbidden_ids=forbidden_token_ids(model_path),
        float32_head=settings.trainer.float32_head,
    )
    rows = PlannedRows.of(
        sequences, group_of, range(len(sequences)), range(len(sequences)), settings.trainer, torch.device("cpu")
    )
    numbered = replace(rows, sequences=_numbered(sequences))
    alone = settings.trainer.model_copy(update={"share_prompts": False, "micro_batch_tokens": 1})
    single = PlannedRows.of(
        numbered.sequences, group_of, range(len(sequences)), range(len(sequences)), alone, torch.device("cpu")
    )
    plain = copy.deepcopy(policy)
    plain.model.set_attn_implementation("sdpa")
    measured = Measured(
        exact_N=logprobs(wide(policy), numbered, dtype=torch.float64),
        engine_N=engine_N.astype(np.float64),
        trainer_N=logprobs(policy, numbered),
        transformers_N=logprobs(plain, single),
        turn_N=np.concatenate([_turns(mask) for mask in own]),
    )
    current_N = version_N == version
    return Measured(**{name: getattr(measured, name)[current_N] for name in Measured.__dataclass_fields__})


def logprobs(policy: PolicyModel, rows: PlannedRows, *, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return float64[N] in the order of the sequences, which are numbered in place of their versions."""
    values, numbers = [], []
    for _, row, _ in rows:
        with torch.inference_mode():
            values.append(policy(_in(row, dtype)).logprobs_N.double().numpy())
        numbers.append(row.versions_N.numpy())
    found = np.empty(sum(map(len, values)))
    found[np.concatenate(numbers)] = np.concatenate(values)
    return found


def wide(policy: PolicyModel) -> PolicyModel:
    """Return a copy that computes in float64 where transformers falls back to float32."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        cos, sin = cos.unsqueeze(-2).to(q.dtype), sin.unsqueeze(-2).to(q.dtype)
        half = modeling.rotate_half
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    def norm(module: Any) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            variance = hidden.pow(2).mean(-1, keepdim=True)
            normed: torch.Tensor = module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))
            return normed

        return forward

    modeling.apply_rotary_pos_emb_vision = rotate
    copied: PolicyModel = copy.deepcopy(policy).double()
    for module in copied.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
    return copied


def print_errors(measured: Measured) -> None:
    """Print each side's error, and the differences of pairs."""
    pairs = {name: values - measured.exact_N for name, values in _sides(measured)}
    pairs["engine - trainer (dlogp)"] = measured.engine_N - measured.trainer_N
    pairs["engine - transformers"] = measured.engine_N - measured.transformers_N
    pairs["trainer - transformers"] = measured.trainer_N - measured.transformers_N
    sys.stdout.write("\n| | rms | 99.9% | largest | tokens above 1e-5 |\n|---|---|---|---|---|\n")
    for name, error_N in pairs.items():
        size_N = np.abs(error_N)
        sys.stdout.write(
            f"| {name} | {np.sqrt((size_N**2).mean()):.1e} | {np.quantile(size_N, 0.999):.1e} | {size_N.max():.1e} | "
            f"{(size_N > 1e-5).sum()} of {len(size_N)} |\n"
        )


def print_parts(measured: Measured) -> None:
    """Print largest errors by turn and by probability."""
    parts = {f"turn {turn + 1}": measured.turn_N == turn for turn in np.unique(measured.turn_N)}
    surprise_N = -measured.exact_N
    for low, high in itertools.pairwise(BOUNDS):
        parts[f"-logp in [{low:g}, {high:g})"] = (surprise_N >= low) & (surprise_N < high)
    names = [name for name, _ in _sides(measured)]
    sys.stdout.write(
        f"\n| tokens | number | {' | '.join(f'{name}: rms, largest' for name in names)} | dlogp, largest |\n"
    )
    sys.stdout.write(f"|{'---|' * (len(names) + 3)}\n")
    for part, chosen_N in parts.items():
        if not chosen_N.any():
            continue
        errors = [(values - measured.exact_N)[chosen_N] for _, values in _sides(measured)]
        cells = [f"{np.sqrt((error**2).mean()):.1e}, {np.abs(error).max():.1e}" for error in errors]
        gap = np.abs(measured.engine_N - measured.trainer_N)[chosen_N].max()
        sys.stdout.write(f"| {part} | {chosen_N.sum()} | {' | '.join(cells)} | {gap:.1e} |\n")


def _sides(measured: Measured) -> list[tuple[str, np.ndarray]]:
    names = ("engine", "trainer", "transformers")
    return [(name, getattr(measured, f"{name}_N")) for name in names]


def _numbered(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Number all own tokens, in place of their versions."""
    numbered, first = [], 0
    for sequence in sequences:
        versions_X = np.full(len(sequence), -1, dtype=np.int64)
        versions_X[sequence.loss_mask_X] = np.arange(first, first + sequence.num_own_tokens)
        first += sequence.num_own_tokens
        numbered.append(replace(sequence, versions_X=versions_X))
    return numbered


def _turns(mask_X: np.ndarray) -> np.ndarray:
    """Return the turn of each own token: what lies between two turns is not the policy's own."""
    begins_X = np.diff(mask_X.astype(np.int8), prepend=0) == 1
    turn_N: np.ndarray = (np.cumsum(begins_X) - 1)[mask_X]
    return turn_N


def _in(row: PackedRow, dtype: torch.dtype) -> PackedRow:
    return row if row.pixel_values_PD is None else replace(row, pixel_values_PD=row.pixel_values_PD.to(dtype))


if __name__ == "__main__":
    sys.exit(main())
