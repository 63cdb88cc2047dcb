"""What a run takes of its machine's memory, against numbers worked out by hand."""

import pytest

from penstock.config import load
from services.plan.host_memory import ENGINE_BYTES, OTHERS_BYTES, RANK_BYTES, host_moments
from services.recipe import Recipe

TOTAL = 1_000_000_000
"""Parameters."""


def bytes_per_parameter(
    *settings: str,
    num_engines: int = 1,
    is_sft: bool = False,
    trained: float = 1.0,
    adapters: float = 0.0,
    adapted: float = 0.0,
    **where: bool,
) -> dict[str, float]:
    """By moment, without what processes take beside weights."""
    recipe = load(Recipe, [], ['--run.name="a"', *settings])
    processes = num_engines * ENGINE_BYTES + OTHERS_BYTES + (recipe.trainer.ranks - 1) * RANK_BYTES
    shares = {"num_trained": trained, "num_adapters": adapters, "num_adapted": adapted}
    counts = {name: int(share * TOTAL) for name, share in shares.items()} | {"num_engines": num_engines}
    moments = host_moments(TOTAL, recipe, **counts, is_sft=is_sft, **where)
    return {moment.name: (moment.total_bytes - processes) / TOTAL for moment in moments}


def test_one_rank_loads_the_model_and_keeps_nothing() -> None:
    """Copies for pushes are on its GPU, and the checkpoint is written from there."""
    assert bytes_per_parameter() == {"when the trainer starts": 4, "in a step": 0}


def test_ranks_read_their_shards_alone() -> None:
    """In a step the host has what is pushed, of which there are two copies, and what a checkpoint takes."""
    assert bytes_per_parameter("--trainer.ranks=8") == {"in a step": 2 * 2 + 12}
    delta = bytes_per_parameter("--trainer.ranks=2", "--trainer.weight_sync.transport=delta")
    assert delta == {"in a step": 3 * 2 + 12}
    assert bytes_per_parameter("--trainer.ranks=8", num_engines=0, is_sft=True) == {"in a step": 12}


def test_offloaded_weights_gradients_and_averages_are_here() -> None:
    """Once for all ranks together, or for each replica of them."""
    offload = ("--trainer.ranks=4", "--trainer.optimizer.offload=true")
    assert bytes_per_parameter(*offload)["in a step"] == 16 + 4 + 12
    assert bytes_per_parameter(*offload, "--trainer.hsdp_replicas=2")["in a step"] == 2 * 16 + 4 + 12
    assert bytes_per_parameter("--trainer.optimizer.offload=true")["in a step"] == 16 + 4


def test_frozen_parts_are_weights_alone() -> None:
    """Without gradients and averages, in checkpoints too."""
    offload = ("--trainer.ranks=4", "--trainer.optimizer.offload=true")
    assert bytes_per_parameter(*offload, trained=0.5)["in a step"] == 4 + 2 + 4 + 4 + (4 + 4)
    assert bytes_per_parameter("--trainer.ranks=8", trained=0.5)["in a step"] == 2 * 2 + 4 + 4


def test_a_reference_policy_is_here() -> None:
    """Each rank has its share of it, and writes it into checkpoints."""
    assert bytes_per_parameter("--trainer.ranks=4", "--algorithm.kl.kind=k3")["in a step"] == 4 + 4 + 12 + 4
    assert bytes_per_parameter("--algorithm.kl.kind=k3")["in a step"] == 4


def test_adapters_are_pushed_alone_and_each_engine_keeps_what_they_change() -> None:
    """In its precision, in the host's memory, wherever its weights are."""
    adapters = ("--trainer.lora.rank=16",)
    found = bytes_per_parameter(*adapters, num_engines=3, trained=0, adapted=0.9)
    assert found == {"when the trainer starts": 3 * 2 * 0.9 + 4, "in a step": 3 * 2 * 0.9}
    on_cpus = {"engines_on_gpu": False, "trainer_on_gpu": False}
    assert bytes_per_parameter(*adapters, trained=0, adapted=0.5, **on_cpus)["in a step"] == 4 + 4 * 0.5 + 4
    assert bytes_per_parameter(*adapters, num_engines=0, trained=0, adapted=0.9)["in a step"] == 0


def test_adapters_that_are_counted() -> None:
    """In float32: on ranks before they have their shards, in copies for pushes, checkpoints, and as a reference."""
    lora = {"adapters": 0.1, "trained": 0.05, "num_engines": 0}
    adapters = ("--trainer.lora.rank=16", "--algorithm.kl.kind=k3")
    alone = bytes_per_parameter(*adapters, **lora)
    assert alone == pytest.approx({"when the trainer starts": 4 + 2 * 0.4, "in a step": 0.4})
    found = bytes_per_parameter(*adapters, "--trainer.ranks=4", **lora)
    assert found == pytest.approx({"when the trainer starts": 4 * 0.4, "in a step": 0.4 + 2 * 0.4 + 2 * 0.4 + 8 * 0.05})
    on_cpu = bytes_per_parameter(*adapters, **lora, engines_on_gpu=False, trainer_on_gpu=False)
    assert on_cpu["in a step"] == pytest.approx(4 + 0.4 + 0.4 + 12 * 0.05 + 2 * 0.4)


def test_on_cpus_everything_is_here() -> None:
    """Engines' weights, in float32 unless the recipe says otherwise, and copies in the precision of the steps."""
    on_cpus = {"engines_on_gpu": False, "trainer_on_gpu": False}
    found = bytes_per_parameter(num_engines=2, **on_cpus)
    assert found == {"when the trainer starts": 2 * 4 + 4, "in a step": 2 * 4 + 16 + 2 * 4}
    rounded = bytes_per_parameter("--rollout.dtype=bfloat16", "--trainer.dtype=bfloat16", num_engines=2, **on_cpus)
    assert rounded["in a step"] == 2 * 2 + 16 + 2 * 2
    adapted = bytes_per_parameter("--trainer.lora.rank=8", num_engines=2, trained=0, adapted=0.5, **on_cpus)
    assert adapted["in a step"] == 2 * 4 + 2 * 4 * 0.5 + 4
