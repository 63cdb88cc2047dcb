"""Two ranks that compute each row together take the steps of one; `run_sequence_parallel.py` has four and more."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.backend.policy.attention import RowLayout, packed_attention
from services.trainer.backend.policy.row_share import RowShare
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.batching.rows import Segment
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.test_ranks import assert_same, backend_of, steps_of, trained

SHARED = {"sequence_parallel": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 90},
        pytest.param({"micro_batch_tokens": 8192, "gradient_checkpointing": True}, marks=pytest.mark.variant),
        {"fixed_rows": True, "micro_batch_tokens": 256},
        pytest.param({"share_prompts": False, "optimizer": {"learning_rates": {"text": 0.0}}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_that_share_rows_take_the_steps_of_one(
    two: RankPool, tiny_model_path: Path, settings: dict[str, Any]
) -> None:
    """Loss, metrics and weights, with prompts that the other rank's responses see, and pictures in deepstack."""
    alone = trained(ALONE, tiny_model_path, settings, range(2))
    for together in two.run(trained, tiny_model_path, settings | SHARED, range(2)):
        assert_same(alone, together)


def gradients_of(
    ranks: Ranks, path: Path, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float], np.ndarray]:
    """AdamW's first averages after a step, of which each is a tenth of the gradient: those that the rank writes.

    And loss and norm of the gradient, which clipping takes out of the averages, and every token's log-probability.
    """
    backend = backend_of(ranks, path, **settings)
    [metrics] = steps_of(backend, path, [0])
    tokens = backend.step_tokens()
    assert tokens is not None
    owned = backend.collect().tensors["optimizer"].owned
    averages = {name: tensor for name, tensor in owned.items() if name.endswith(".exp_avg")}
    order = tokens.sample_N.argsort(kind="stable")  # rows are cut in another way
    return averages, [metrics["loss"], metrics["grad_norm"]], tokens.logprobs_N[order]


def require_same_gradients(alone: Any, shares: list[Any]) -> None:
    """Of each parameter, to a fifty-thousandth of its largest element; and the same losses and log-probabilities."""
    together = {name: tensor for averages, _, _ in shares for name, tensor in averages.items()}
    assert alone[0].keys() == together.keys()
    for name, expected in alone[0].items():
        size = float(expected.abs().max())
        torch.testing.assert_close(
            together[name], expected, rtol=0, atol=2e-5 * size + 1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    for _, numbers, logprobs_N in shares:
        assert numbers == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
        np.testing.assert_allclose(logprobs_N, alone[2], rtol=0, atol=3e-5)


def test_the_gradient_of_each_parameter_is_that_of_one_rank(two: RankPool, tiny_model_path: Path) -> None:
    """A plain sum over the ranks, also of embedding and tower, which each computes for the whole row."""
    settings: dict[str, Any] = {"micro_batch_tokens": 90}
    alone = gradients_of(ALONE, tiny_model_path, settings)
    require_same_gradients(alone, two.run(gradients_of, tiny_model_path, settings | SHARED))


HEADS = ((4, 2), (6, 6), (4, 1))
"""Heads, and those of keys and values, of which two ranks repeat a single one."""


def row_of(seed: int) -> tuple[list[Segment], list[torch.Tensor], torch.Tensor]:
    """Segments of a row of 1 to 40 tokens, [1, H, T, D] queries and so on, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    prompt, *responses = (torch.randint(0, 14, (3,), generator=generator) + torch.tensor([1, 0, 0])).tolist()
    segments, start = [Segment(start=0, stop=prompt)], prompt
    for length in filter(None, responses):
        segments.append(Segment(start=start, stop=start + length, prefix_start=0, prefix_stop=prompt))
        start += length
    heads, kv_heads = HEADS[seed % len(HEADS)]
    states = [torch.randn(1, number, start, 8, generator=generator) for number in (heads, kv_heads, kv_heads)]
    return segments, states, torch.randn(1, start, heads, 8, generator=generator)


def attended(
    segments: list[Segment], states: list[torch.Tensor], gradient: torch.Tensor, share: RowShare | None
) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values: of the share's tokens, in order of tokens."""
    tokens = slice(None) if share is None else share.tokens
    own = [each[:, :, tokens].clone().requires_grad_() for each in states]
    layout = RowLayout(segments, torch.device("cpu"))
    output, _ = packed_attention(torch.nn.Identity(), *own, None, scaling=0.5, row_layout=layout, row_share=share)
    output.backward(gradient[:, tokens])
    return [output.detach(), *(each.grad.transpose(1, 2) for each in own if each.grad is not None)]


def attended_together(ranks: Ranks, seeds: Sequence[int]) -> list[list[torch.Tensor]]:
    """What this rank computes of each row."""
    group = ranks.sharing_rows(ranks.size).sequence_group
    found = []
    for seed in seeds:
        segments, states, gradient = row_of(seed)
        share = RowShare(states[0].shape[2], size=group.size, number=group.number, group=group.exchange)
        found.append(attended(segments, states, gradient, share))
    return found


@pytest.mark.slow
def test_attention_over_any_row_is_that_of_one_rank(two: RankPool) -> None:
    """Its output and its gradients, also where a rank has a single token or none."""
    seeds = range(40)
    shares = two.run(attended_together, seeds)
    for seed in seeds:
        whole = attended(*row_of(seed), None)
        parts = [torch.cat(each, dim=1) for each in zip(*(share[seed] for share in shares), strict=True)]
        assert len(parts) == len(whole) == 4
        for expected, found in zip(whole, parts, strict=True):
            torch.testing.assert_close(
                found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, seed=seed: f"{seed} {text}"
            )
