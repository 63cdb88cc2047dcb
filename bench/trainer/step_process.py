"""One subject of `bench_trainer.py` in its own process, because its memory is measured; see `turns.py`.

python -m bench.trainer.step_process group_rows --model DIR --workload FILE --threads 2
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.trainer.padded import PaddedPolicy, plan_padded
from bench.trainer.turns import Turns
from bench.trainer.workload import Workload, read_groups
from penstock.model.tokens import forbidden_token_ids
from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig, OptimizerConfig

MICRO_BATCH_TOKENS = 8192
OPTIMIZER = OptimizerConfig(learning_rate=1e-6)

Step = Callable[[], float]
"""Takes an optimizer step and returns the gradient's norm before clipping."""


def rows(model: Path, groups: Sequence[TrainGroup], *, share_prompts: bool) -> Step:
    """Return Penstock's own step."""
    config = BackendConfig(
        device="cpu", micro_batch_tokens=MICRO_BATCH_TOKENS, share_prompts=share_prompts, optimizer=OPTIMIZER
    )
    backend = InProcessBackend(model, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    return lambda: take_step(backend, [groups], 1)["grad_norm"]


def padded(model: Path, groups: Sequence[TrainGroup]) -> Step:
    """Return the same step on padded samples: same loss, same optimizer, same number of tokens per forward pass."""
    policy = PaddedPolicy.load(model, temperature=1.0, forbidden_ids=forbidden_token_ids(model))
    parameters = list(policy.model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=OPTIMIZER.learning_rate, weight_decay=0.0, fused=True)
    sequences = [sequence for group in groups for sequence in group.sequences]
    counts = np.array([sequence.num_own_tokens for sequence in sequences])
    rewards = np.array([reward for group in groups for reward in group.rewards])
    group_of = np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups])
    advantages = sample_advantages(rewards, group_of, counts, AdvantageConfig())

    def step() -> float:
        for numbers in plan_padded([len(sequence) for sequence in sequences], MICRO_BATCH_TOKENS):
            logprobs_N = policy.logprobs([sequences[number] for number in numbers])
            engine_N = torch.from_numpy(
                np.concatenate([sequences[n].engine_logprobs_X[sequences[n].loss_mask_X] for n in numbers])
            )
            advantages_N = torch.from_numpy(advantages[numbers].repeat(counts[numbers])).float()
            weights_N = (logprobs_N.detach() - engine_N).exp().clamp(max=2.0)
            (-(weights_N * advantages_N * logprobs_N).sum() / counts.sum()).backward()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.grad_clip))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return grad_norm

    return step


SUBJECTS: dict[str, Callable[[Path, Sequence[TrainGroup]], Step]] = {
    "group_rows": lambda model, groups: rows(model, groups, share_prompts=True),
    "packed": lambda model, groups: rows(model, groups, share_prompts=False),
    "padded": padded,
}


def main() -> None:
    """Take a step for each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    turns = Turns()
    torch.set_num_threads(arguments.threads)
    step = SUBJECTS[arguments.subject](arguments.model, read_groups(arguments.model, Workload.read(arguments.workload)))
    while True:
        turns.begin()
        turns.end(grad_norm=step())


if __name__ == "__main__":
    main()
