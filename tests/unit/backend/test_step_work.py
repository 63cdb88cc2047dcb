"""Metrics of what a step computes: how fast, and how evenly its ranks share it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.base import take_step
from services.trainer.backend.device import peak_tflops
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.policy.model_flops import ModelFlops, PassFlops
from services.trainer.backend.policy.planned_rows import PlannedRows
from services.trainer.backend.ranks.ranks import Ranks
from services.trainer.backend.ranks.sequence_groups import SequenceGroup
from services.trainer.backend.step_work import Arithmetic, StepWork
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.packing import Block, pack
from services.trainer.batching.product_counts import ProductCounts
from services.trainer.batching.row_costs import RowCosts
from services.trainer.batching.sequences import TrainGroup, TrainSequence
from services.trainer.config import BackendConfig
from services.trainer.sft.sequences import DemonstrationReader
from tests.support.trainer.data.pictures import png
from tests.support.trainer.data.sft import demonstration
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of

COSTS = RowCosts(per_pair=0.1, per_patch=0.5)
ONE = PassFlops(token=1, pair=1, own_token=1, patch=1, patch_pair=1)
FLOPS = ModelFlops(forward=ONE, backward=ONE, tower_windows=())


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Three with a signal, the first with a picture and the second with a masked sample, and two of equal rewards."""
    return groups_of(tiny_model_path)


@pytest.fixture(scope="module")
def learned(tiny_model_path: Path) -> list[TrainSequence]:
    """Text and a picture."""
    reader = DemonstrationReader.open(tiny_model_path)
    shown = demonstration("<image>?", "the first", images=[png(size=(64, 96))])
    return [reader.read(example) for example in (demonstration("Say five.", "five, of course"), shown)]


def loaded(path: Path, algorithm: Mapping[str, Any]) -> InProcessBackend:
    """A backend that has loaded the model."""
    axes = AlgorithmConfig.model_validate(algorithm)
    config = BackendConfig(device="cpu")
    backend = InProcessBackend(path, config, axes, seed=0, temperature=1.0, demonstration_coef=0.5)
    backend.load(None)
    return backend


def flops_in(metrics: Mapping[str, float]) -> float:
    """Operations of a step."""
    return metrics["tflops_per_rank"] * 1e12 * metrics["step_time_s"]


def counts_of(chosen: Sequence[Sequence[TrainSequence]]) -> ProductCounts:
    """What is multiplied in one row of these sequences of each group."""
    sequences = [sequence for group in chosen for sequence in group]
    group_of = [number for number, group in enumerate(chosen) for _ in group]
    return ProductCounts.of(
        pack(sequences, group_of, range(len(sequences)), max_tokens=100_000, share_prompts=True), sequences
    )


@pytest.mark.parametrize(
    ("algorithm", "trained", "num_trained", "measured", "num_measured"),
    [
        ({}, [range(4), range(3), range(3)], 1, [[], [], [], [2]], 1),
        ({"kl": {"kind": "k3"}}, [range(4), range(3), range(3), range(4), range(4)], 2, [[], [3]], 2),
        (
            {"correction": {"kind": "truncate", "normalize": True}},
            [range(4), range(3), range(3)],
            2,
            [[], [3], [], range(4), range(4)],
            1,
        ),
    ],
    ids=["forward and backward", "a reference policy", "statistics of the whole batch"],
)
def test_every_pass_of_a_step_is_counted(
    tiny_model_path: Path,
    groups: list[TrainGroup],
    algorithm: dict[str, Any],
    trained: list[Sequence[int]],
    num_trained: int,
    measured: list[Sequence[int]],
    num_measured: int,
) -> None:
    """Samples without gradient are computed forwards alone, one in eight of them unless all are needed."""
    backend = loaded(tiny_model_path, algorithm)
    found = flops_in(take_step(backend, [groups], VERSION))
    flops = backend._model.arithmetic.flops
    of_trained, of_measured = (
        counts_of(
            [
                [group.sequences[number] for number in numbers]
                for group, numbers in zip(groups, chosen, strict=False)
                if numbers
            ]
        )
        for chosen in (trained, measured)
    )
    expected = flops.of(of_trained, num_forward=num_trained, with_gradient=True)
    expected += flops.of(of_measured, num_forward=num_measured, with_gradient=False)
    assert found == pytest.approx(expected, rel=1e-9)


def test_demonstrations_and_supervised_steps_are_counted(
    tiny_model_path: Path, groups: list[TrainGroup], learned: list[TrainSequence]
) -> None:
    """Each on its own, with their gradient."""
    backend = loaded(tiny_model_path, {})
    alone = flops_in(take_step(backend, [groups], VERSION))
    together = flops_in(take_step(backend, [groups], VERSION, learned))
    expected = backend._model.arithmetic.flops.of(counts_of([[each] for each in learned]), with_gradient=True)
    assert together - alone == pytest.approx(expected, rel=1e-6)
    supervised = InProcessSupervisedBackend(tiny_model_path, BackendConfig(device="cpu"), seed=0)
    supervised.load(None)
    assert flops_in(supervised.step(learned)) == pytest.approx(expected, rel=1e-9)


def planned(sequences: Sequence[TrainSequence], ranks: Ranks) -> PlannedRows:
    """Rows of one sequence each."""
    return PlannedRows(
        sequences=sequences,
        samples=range(len(sequences)),
        plan=[(Block(sequences=(number,), prefix_length=0),) for number in range(len(sequences))],
        row_lengths=[0] * len(sequences),
        device=torch.device("cpu"),
        ranks=ranks,
        costs=COSTS,
    )


def imbalance_of(*planned_rows: tuple[PlannedRows, bool]) -> float:
    """That of a step of these rows, with gradient or without."""
    work, arithmetic = StepWork(), Arithmetic(flops=FLOPS, peak_tflops=None)
    for rows, with_gradient in planned_rows:
        work.add(rows, arithmetic, with_gradient=with_gradient)
    return work.metrics(arithmetic, num_ranks=1, duration_s=1.0)["rank_imbalance"]


@given(st.lists(st.integers(0, 17), min_size=1, max_size=6), st.integers(0, 6), st.integers(1, 4))
def test_imbalance_is_of_the_rows_that_ranks_compute(
    groups: list[TrainGroup], numbers: list[int], num_trained: int, num_ranks: int
) -> None:
    """Three passes of the rows with gradient and one of the others, and none of a row that is another rank's."""
    samples = [sequence for group in groups for sequence in group.sequences]
    trained = [samples[number] for number in numbers[:num_trained]]
    measured = [samples[number] for number in numbers[num_trained:]]

    def of_rank(rank: int) -> list[tuple[PlannedRows, bool]]:
        ranks = Ranks(rank=rank, size=num_ranks)
        return [(planned(trained, ranks), True), (planned(measured, ranks), False)]

    spent = [0.0] * num_ranks
    for rank in range(num_ranks):
        for rows, with_gradient in of_rank(rank):
            for row in (each.row for each in rows if each.counts):
                num_patches = 0 if row.pixel_values_PD is None else len(row.pixel_values_PD)
                cost = row.num_tokens + 0.1 * row.num_tokens * (row.num_tokens + 1) / 2 + 0.5 * num_patches
                spent[rank] += cost * (3 if with_gradient else 1)
    assert imbalance_of(*of_rank(0)) == pytest.approx(max(spent) * num_ranks / sum(spent))


def test_imbalance_by_hand(groups: list[TrainGroup]) -> None:
    """Two equal rows are even on two ranks, but three are not: the second waits for one. Ranks that share rows are
    one, and so are ranks without rows.
    """
    same = [groups[3].sequences[0]] * 3
    assert imbalance_of((planned(same, Ranks()), True)) == 1
    assert imbalance_of((planned(same[:2], Ranks(size=2)), True)) == 1
    assert imbalance_of((planned(same, Ranks(size=2)), True)) == pytest.approx(2 / 1.5)
    assert imbalance_of((planned(same, Ranks(size=2, sequence_group=SequenceGroup(size=2))), True)) == 1
    assert imbalance_of((planned(same, Ranks(size=4, sequence_group=SequenceGroup(size=2))), True)) == pytest.approx(
        2 / 1.5
    )
    assert imbalance_of((planned([], Ranks(size=2)), True)) == 1


def test_utilisation_is_of_a_known_peak() -> None:
    """By hand: 6 * 10^12 operations of 2 ranks in 3 s are 10^12 for each and second, half of a peak of 2; else none."""
    work = StepWork(flops=6e12)
    unknown = work.metrics(Arithmetic(flops=FLOPS, peak_tflops=None), num_ranks=2, duration_s=3.0)
    assert unknown["tflops_per_rank"] == 1
    assert "mfu" not in unknown
    known = work.metrics(Arithmetic(flops=FLOPS, peak_tflops=2.0), num_ranks=2, duration_s=3.0)
    assert known["mfu"] == 0.5


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H200", torch.float32, None),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, None),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("Somebody's accelerator", torch.bfloat16, None),
    ],
)
def test_peaks_are_of_whole_gpus_in_bfloat16(
    name: str, dtype: torch.dtype, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of a GPU has less, and so have products in float32."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_tflops(torch.device("cuda", 0), dtype) == peak
    assert peak_tflops(torch.device("cpu"), dtype) is None
