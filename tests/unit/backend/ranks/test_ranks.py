"""A step that two ranks compute together is the step of one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from services.trainer.backend.supervised import InProcessSupervisedBackend
from services.trainer.batching.sequences import TrainGroup
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.families import MIXTURES, heard, random_qwen3_5, write_model
from tests.support.trainer.grouped_products import count_grouped_products
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.support.trainer.teacher import write_teacher
from tests.unit.algorithm.test_chunks import ALGORITHMS

OF_THE_CUT = {
    "step_time_s",
    "trained_tokens_per_s",
    "tflops_per_rank",
    "rank_imbalance",
    "shared_token_fraction",
    "host_memory_peak_bytes",
}
"""Metrics that depend on how rows are cut."""


def backend_of(ranks: Ranks, path: Path, checkpoint: Path | None = None, **settings: Any) -> InProcessBackend:
    """One that has loaded the model, or a checkpoint. `algorithm` is that; other settings are the trainer's."""
    num_replicas = settings.pop("hsdp_replicas", 1)
    algorithm = AlgorithmConfig.model_validate(settings.pop("algorithm", {}))
    expert_parallel = settings.pop("expert_parallel", 1)
    sequence_parallel = settings.pop("sequence_parallel", 1)
    optimizer = OptimizerConfig(**({"learning_rate": 1e-3} | settings.pop("optimizer", {})))
    config = BackendConfig(device="cpu", optimizer=optimizer, **settings)
    backend = InProcessBackend(
        path,
        config,
        algorithm,
        seed=0,
        temperature=1.0,
        adam_eps=1e-3,
        hsdp_replicas=num_replicas,
        expert_parallel=expert_parallel,
        sequence_parallel=sequence_parallel,
        ranks=ranks,
    )
    backend.load(checkpoint)
    return backend


def steps_of(backend: InProcessBackend, path: Path, seeds: Sequence[int], *, first: int = 0) -> list[dict[str, float]]:
    """Metrics of a step for each seed, of the groups from `first` on, in chunks."""
    metrics = []
    for seed in seeds:
        groups: list[TrainGroup] = groups_of(path, seed=seed)[first:]
        metrics.append(take_step(backend, [groups[:1], groups[1:2], groups[2:]], VERSION + seed))
    return metrics


def weights_of(backend: InProcessBackend) -> dict[str, torch.Tensor]:
    """A copy of them."""
    return {name: weight.clone() for name, weight in backend.export()}


def trained(
    ranks: Ranks, path: Path, settings: dict[str, Any], seeds: Sequence[int] = (0,), first: int = 0
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and metrics after some steps."""
    backend = backend_of(ranks, path, **settings)
    metrics = steps_of(backend, path, seeds, first=first)
    return weights_of(backend), metrics


def trained_by_each(
    ranks: Ranks, path: Path, algorithms: dict[str, Any]
) -> dict[str, tuple[dict[str, torch.Tensor], list[dict[str, float]]]]:
    """Weights and metrics of a step with each algorithm."""
    return {name: trained(ranks, path, {"algorithm": algorithm}) for name, algorithm in algorithms.items()}


def assert_same(one: Any, other: Any, *, atol: float = 2e-6) -> None:
    """Weights and metrics are, up to the order of sums."""
    for name, weight in one[0].items():
        torch.testing.assert_close(other[0][name], weight, rtol=0, atol=atol, msg=lambda text, name=name: name + text)
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - OF_THE_CUT:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 8192},
        pytest.param({"micro_batch_tokens": 90}, marks=pytest.mark.variant),
        pytest.param({"fixed_rows": True, "micro_batch_tokens": 256}, marks=pytest.mark.variant),
        {"fixed_rows": True, "micro_batch_tokens": 256, "row_lengths": 2},
        pytest.param({"gradient_checkpointing": True, "micro_batch_tokens": 90}, marks=pytest.mark.slow),
        pytest.param(
            {"micro_batch_tokens": 90, "optimizer": {"learning_rates": {"text": 0.0}}}, marks=pytest.mark.variant
        ),
        pytest.param(
            {"optimizer": {"learning_rates": {"tower": 0.0}, "grad_clip": 1e-3, "weight_decay": 0.1}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_two_ranks_take_the_steps_of_one(two: RankPool, tiny_model_path: Path, settings: dict[str, Any]) -> None:
    """However rows are cut, with pictures in the rows of one rank only, and more ranks than rows."""
    alone = trained(ALONE, tiny_model_path, settings, range(2))
    for together in two.run(trained, tiny_model_path, settings, range(2)):
        assert_same(alone, together)


def test_two_ranks_take_the_steps_of_one_with_linear_attention(two: RankPool, tmp_path: Path) -> None:
    """Whose states no rank hands to another: each has whole rows."""
    path = write_model(heard(random_qwen3_5()), tmp_path / "qwen3_5")
    settings = {"micro_batch_tokens": 90}
    alone = trained(ALONE, path, dict(settings), range(2))
    for together in two.run(trained, path, settings, range(2)):
        assert_same(alone, together)


@pytest.mark.parametrize(
    ("kind", "router_replay"),
    [
        ("qwen3_vl_moe", True),
        ("qwen3_moe", False),
        pytest.param("qwen3_vl_moe", False, marks=pytest.mark.variant),
        pytest.param("qwen3_moe", True, marks=pytest.mark.variant),
    ],
)
def test_two_ranks_take_the_steps_of_one_with_a_mixture_of_experts(
    two: RankPool, tmp_path: Path, kind: str, router_replay: bool
) -> None:
    """Their experts are shards as other weights are; routers choose, or take what an engine chose."""
    path = write_model(heard(MIXTURES[kind](), std_of_embedding=0.3), tmp_path / kind)
    settings = {"micro_batch_tokens": 90, "router_replay": router_replay}
    alone = trained(ALONE, path, settings, range(2))
    for together in two.run(trained, path, settings, range(2)):
        assert_same(alone, together)


def grouped_products(ranks: Ranks, path: Path, settings: dict[str, Any]) -> list[int]:
    """Those of each forward pass of a step."""
    backend = backend_of(ranks, path, **settings)
    counts = count_grouped_products(backend)
    steps_of(backend, path, [0])
    return counts


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_each_rank_computes_all_of_its_experts_at_once(
    two: RankPool, tmp_path: Path, kind: str, expert_parallel: int
) -> None:
    """By two grouped products in each layer, whether it gathers all experts or has its own; tests of the results would
    pass with a loop over experts, too."""
    model = MIXTURES[kind]()
    path = write_model(model, tmp_path / kind)
    settings = {"micro_batch_tokens": 90, "expert_parallel": expert_parallel}
    for counts in two.run(grouped_products, path, settings):
        assert set(counts) == {2 * model.config.get_text_config().num_hidden_layers}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.variant)])
def test_offloading_changes_no_bit_of_what_two_ranks_compute(two: RankPool, tiny_model_path: Path, dtype: str) -> None:
    """Shards, gradients and averages are in the host's memory, with a reference and a part that is frozen."""
    settings = {"dtype": dtype, "algorithm": {"kl": {"kind": "k3", "refresh": "copy"}}}
    assert_offloading_changes_no_bit(two, tiny_model_path, settings, {"learning_rates": {"tower": 0.0}})


@pytest.mark.slow
def test_offloading_changes_no_bit_of_what_owners_of_experts_compute(two: RankPool, tmp_path: Path) -> None:
    """Each rank's own experts are in the host's memory, as all else is."""
    path = write_model(heard(MIXTURES["qwen3_moe"](), std_of_embedding=0.3), tmp_path / "mixture")
    assert_offloading_changes_no_bit(two, path, {"expert_parallel": 2}, {})


def assert_offloading_changes_no_bit(
    pool: RankPool, path: Path, settings: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """Of weights and metrics of two steps with these settings."""
    for held, offloaded in zip(
        *(
            pool.run(
                trained,
                path,
                settings
                | {"micro_batch_tokens": 90, "optimizer": optimizer | {"weight_decay": 0.1, "offload": offload}},
                range(2),
            )
            for offload in (False, True)
        ),
        strict=True,
    ):
        assert all(torch.equal(weight, offloaded[0][name]) for name, weight in held[0].items())
        for ours, theirs in zip(held[1], offloaded[1], strict=True):
            assert {name: ours[name] for name in ours.keys() - OF_THE_CUT} == {
                name: theirs[name] for name in theirs.keys() - OF_THE_CUT
            }


READS_OTHERS = ("m2po", "gspo", "kl in reward", "normalised")
"""Algorithms that read of other rows in different ways: statistics of the batch, whole samples, a reference."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        READS_OTHERS,
        [name for name in PRESETS if name not in READS_OTHERS],
        pytest.param([name for name in ALGORITHMS if name not in {*READS_OTHERS, *PRESETS}], marks=pytest.mark.variant),
    ],
    ids=["read of others", "other presets", "others"],
)
def test_every_algorithm_takes_the_same_step_on_two_ranks(
    two: RankPool, tiny_model_path: Path, names: Sequence[str]
) -> None:
    """What it reads of other rows it reads of other ranks."""
    algorithms = {name: ALGORITHMS[name] for name in names}
    alone = trained_by_each(ALONE, tiny_model_path, algorithms)
    for together in two.run(trained_by_each, tiny_model_path, algorithms):
        for name in algorithms:
            assert_same(alone[name], together[name])


@pytest.mark.slow
def test_two_ranks_learn_from_a_teacher_as_one(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """Each has its shard of the teacher's weights."""
    teacher = write_teacher(tiny_model_path, tmp_path / "teacher")
    settings = {"micro_batch_tokens": 90, "algorithm": {"kl": {"kind": "k2", "coef": 1.0, "reference": teacher}}}
    alone = trained(ALONE, tiny_model_path, dict(settings), range(2))
    assert alone[1][0]["kl_reference"] != 0
    for together in two.run(trained, tiny_model_path, settings, range(2)):
        assert_same(alone, together)


@pytest.mark.slow
def test_a_batch_without_pictures_leaves_the_tower_as_it_is(two: RankPool, tiny_model_path: Path) -> None:
    """Neither weight decay nor averages of earlier steps move it, as on one rank."""
    settings = {"optimizer": {"weight_decay": 0.1}}
    alone = trained(ALONE, tiny_model_path, settings, range(2), 1)
    before = weights_of(backend_of(ALONE, tiny_model_path))
    for together in two.run(trained, tiny_model_path, settings, range(2), 1):
        assert_same(alone, together)
        assert all(torch.equal(weight, before[name]) for name, weight in together[0].items() if "visual" in name)


def supervised(
    ranks: Ranks, path: Path, first: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], tuple[float, int]]:
    """Weights, metrics and a measured loss after two supervised steps on the groups' samples."""
    config = BackendConfig(device="cpu", micro_batch_tokens=90, optimizer=OptimizerConfig(learning_rate=1e-3))
    backend = InProcessSupervisedBackend(path, config, seed=0, ranks=ranks)
    backend.load(None)
    sequences = [sequence for group in groups_of(path)[first:] for sequence in group.sequences]
    metrics = [backend.step(sequences), backend.step(sequences[3:])]
    measured = backend.measure(sequences)
    weights = {name: weight.clone() for name, weight in backend._model.weights.named()}
    return weights, metrics, (measured.total, measured.num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [pytest.param(0, id="with pictures"), pytest.param(1, id="without", marks=pytest.mark.variant)]
)
def test_two_ranks_take_the_supervised_steps_of_one(two: RankPool, tiny_model_path: Path, first: int) -> None:
    """And measure the same loss. AdamW divides by the gradient's size, and so enlarges the rounding of small ones: a
    fiftieth of a step is allowed."""
    alone = supervised(ALONE, tiny_model_path, first)
    for together in two.run(supervised, tiny_model_path, first):
        assert_same(alone[:2], together[:2], atol=2e-5)
        assert together[2] == pytest.approx(alone[2], rel=1e-5)


def mixed(
    ranks: Ranks, path: Path, settings: dict[str, Any], first: int, pictures: bool
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and metrics after two steps of groups, from the `first` on, and demonstrations."""
    algorithm = AlgorithmConfig.model_validate(settings.pop("algorithm", {}))
    config = BackendConfig(device="cpu", optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1), **settings)
    backend = InProcessBackend(
        path, config, algorithm, seed=0, temperature=0.7, demonstration_coef=0.5, adam_eps=1e-3, ranks=ranks
    )
    backend.load(None)
    learned = [sequence for group in groups_of(path, seed=7) for sequence in group.sequences]
    learned = [sequence for sequence in learned if bool(sequence.images) is pictures][:3]
    metrics = []
    for seed in range(2):
        groups = groups_of(path, seed=seed)[first:]
        metrics.append(take_step(backend, [groups[:1], groups[1:]], VERSION + seed, learned[seed:]))
    return weights_of(backend), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "pictures"),
    [
        pytest.param(0, False, id="groups with pictures", marks=pytest.mark.variant),
        pytest.param(1, True, id="demonstrations with pictures", marks=pytest.mark.variant),
        pytest.param(3, False, id="groups of equal rewards"),
        pytest.param(0, True, id="both with pictures", marks=pytest.mark.variant),
        pytest.param(1, False, id="neither", marks=pytest.mark.variant),
        pytest.param(3, True, id="of equal rewards, with pictures", marks=pytest.mark.variant),
    ],
)
def test_two_ranks_learn_demonstrations_beside_groups_as_one(
    two: RankPool, tiny_model_path: Path, first: int, pictures: bool
) -> None:
    """Each computes its own rows of both; under a temperature, with a reference beside the policy."""
    settings = {"micro_batch_tokens": 90, "algorithm": {"kl": {"kind": "k3"}}}
    alone = mixed(ALONE, tiny_model_path, dict(settings), first, pictures)
    for together in two.run(mixed, tiny_model_path, settings, first, pictures):
        assert_same(alone, together)
    assert alone[1][0]["num_demonstrations"] == 3


def step_with_a_hole(ranks: Ranks, path: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """As `trained`, with a policy that gives one group's tokens no number."""
    backend = backend_of(ranks, path, micro_batch_tokens=90)
    compute = backend._parts.passes.model
    groups = groups_of(path)
    first_of_third_group = len(groups[0].samples) + len(groups[1].samples)

    def with_hole(row: Any) -> Any:
        said = compute(row)
        return said._replace(logprobs_N=said.logprobs_N.masked_fill(row.sample_N == first_of_third_group, torch.nan))

    object.__setattr__(backend._parts.passes, "model", with_hole)
    metrics = take_step(backend, [groups], VERSION)
    return weights_of(backend), [metrics]


def test_a_group_without_numbers_is_skipped_by_all(two: RankPool, tiny_model_path: Path) -> None:
    """Only one rank computes it; the others learn of it before they go on."""
    for weights, [metrics] in two.run(step_with_a_hole, tiny_model_path):
        assert metrics["num_groups_skipped"] == 1
        assert metrics["skipped"] == 0
        assert all(weight.isfinite().all() for weight in weights.values())


def groups_of_weights(ranks: Ranks, path: Path) -> tuple[set[str], str]:
    """The groups that hold all shards of a backend's weights, and the one that it was given."""
    model = backend_of(ranks, path, hsdp_replicas=2).policy.model
    meshes = [parameter.device_mesh for parameter in model.parameters()]
    given = ranks.replicated(2).mesh
    return {mesh.get_group("shard").group_name for mesh in meshes}, given.get_group("shard").group_name


def test_replicas_that_are_formed_again_are_the_same_groups(two: RankPool, tiny_model_path: Path) -> None:
    """torch takes equal meshes for one, so weights could be in the groups of another one, not the same on all ranks."""
    for _ in range(2):
        for of_weights, given in two.run(groups_of_weights, tiny_model_path):
            assert of_weights == {given}


@pytest.mark.slow
def test_two_ranks_skip_a_step_whose_tokens_are_all_rejected(two: RankPool, tiny_model_path: Path) -> None:
    """Both of them, although it comes in chunks; the weights stay."""
    settings = {"algorithm": {"preset": "ppo", "rejection": {"kind": "k3", "max_k3": 1e-12}}}
    start = weights_of(backend_of(ALONE, tiny_model_path))
    for weights, [metrics] in two.run(trained, tiny_model_path, settings):
        assert (metrics["skipped"], metrics["rejected_fraction"], metrics["num_chunks"]) == (1, 1, 3)
        assert all(torch.equal(weight, start[name]) for name, weight in weights.items())
