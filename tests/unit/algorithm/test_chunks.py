"""An optimizer step whose groups come one after the other, or in other rows, is the step of the whole batch."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS
from services.trainer.algorithm.statistics import needs_statistics, whole_batch_setting
from services.trainer.backend.base import take_step
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import TrainGroup, open_reader
from services.trainer.config import BackendConfig, OptimizerConfig
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.token_batches import EXAMPLE, unseen_choices

VERSION = 3
WHOLE = [[0, 1, 2, 3, 4]]
"""All groups in one chunk."""
HALF_A_GROUP = 45
"""Tokens of a row that holds two samples of a group, and not all four."""
OF_THE_CUT = {
    "step_time_s",
    "trained_tokens_per_s",
    "tflops_per_rank",
    "packing_density",
    "shared_token_fraction",
    "host_memory_peak_bytes",
    "num_chunks",
}
"""Metrics that may differ from one cut to another."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "dr_grpo, constant": {"advantage": {"kind": "dr_grpo"}, "aggregation": {"kind": "constant", "length": 9}},
    "rloo, prompt": {"advantage": {"kind": "rloo"}, "aggregation": {"kind": "prompt"}},
    "linear length penalty": {
        "advantage": {"kind": "dr_grpo", "length_penalty": {"kind": "linear", "length_factor": 0.5}}
    },
    "reinforce_pp_baseline": {"advantage": {"kind": "reinforce_pp_baseline"}},
    "kl in reward": {"advantage": {"kind": "reinforce_pp"}, "kl": {"kind": "k1_in_reward", "coef": 0.1}},
    "regularised": {"kl": {"kind": "k3"}, "drift": 0.01, "entropy": {"kind": "bonus", "coef": 0.01}},
    "vetoed": {"correction": {"kind": "clip", "level": "sequence", "low": 0.1, "veto_low": 1e-3}},
    "normalised": {"correction": {"kind": "truncate", "normalize": True}, "aggregation": {"kind": "sequence"}},
    "normalised by samples": {
        "correction": {"kind": "clip", "level": "sequence", "low": 0.1, "normalize": True},
        "kl": {"kind": "k3"},
    },
    "m2po, most kept": {"preset": "m2po", "rejection": {"max_m2": 9.0}},
    "opsm": {"preset": "ppo", "rejection": {"kind": "opsm", "max_drop": 0.0}},
    "maxrl, dual clip, k2, geometric rejection": {
        "preset": "dapo",
        "advantage": {"kind": "maxrl"},
        "trust_region": {"dual": 3.0},
        "kl": {"kind": "k2"},
        "rejection": {"kind": "geometric", "low": 0.1, "high": 10.0},
    },
    "dppo_kl, k3_plus, k3 rejection": {
        "preset": "dppo",
        "trust_region": {"kind": "dppo_kl", "cap": 5.0},
        "kl": {"kind": "k3_plus"},
        "rejection": {"kind": "k3", "max_k3": 9.0},
    },
    "gmpo, soft overlong, geometric mask": {
        "anchor": "log_linear",
        "advantage": {
            "kind": "dr_grpo",
            "length_penalty": {"kind": "soft_overlong", "max_tokens": 6, "buffer_tokens": 4},
        },
        "trust_region": {"kind": "custom", "function": f"{EXAMPLE}:gmpo", "options": {"low": 1.0, "high": 1.0}},
        "correction": {"kind": "mask", "level": "geometric", "low": 0.1, "high": 10.0},
        "aggregation": {"kind": "sequence"},
    },
    "opo": {"advantage": {"kind": "custom", "function": f"{EXAMPLE}:opo"}, "entropy": {"kind": "target"}},
}


def loaded(
    path: Path, checkpoint: Path | None = None, *, micro_batch_tokens: int = 8192, **algorithm: Any
) -> InProcessBackend:
    """One that has loaded the model, or a checkpoint; an update is nearly proportional to the gradient."""
    optimizer = OptimizerConfig(learning_rate=0.1, grad_clip=1e9)
    config = BackendConfig(device="cpu", micro_batch_tokens=micro_batch_tokens, optimizer=optimizer)
    axes = AlgorithmConfig.model_validate(algorithm)
    backend = InProcessBackend(path, config, axes, seed=0, temperature=1.0, adam_eps=1.0)
    backend.load(checkpoint)
    return backend


@pytest.fixture(scope="module")
def groups(tiny_model_path: Path) -> list[TrainGroup]:
    """Three with a signal and two of equal rewards, of several versions and sizes; the first has a picture.

    The engine's log-probabilities are random, so the ratios to them are far from 1: below it, but in the third group.
    """
    reader = open_reader(tiny_model_path)
    rewards = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.5), (0.0, 1.0, 0.0), (0.9,) * 4, (0.3,) * 4]
    made = []
    for index, version in enumerate((1, 2, 3, 3, 2)):
        shown: dict[str, Any] = {"images": [picture(index)], "placeholders": [9]} if index == 0 else {}
        group = make_group(tiny_model_path, index=index, rewards=rewards[index], version=version, **shown)
        made.append(reader.read(group, IMAGES))
    made[1] = replace(made[1], masked=(False, False, False, True))
    unlikelier = [replace(each, engine_logprobs_X=each.engine_logprobs_X - 3) for each in made[2].sequences]
    made[2] = replace(made[2], samples=tuple((each,) for each in unlikelier))
    return made


def stepped(
    path: Path, groups: list[TrainGroup], cut: list[list[int]], *, micro_batch_tokens: int = 8192, **algorithm: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The metrics of a step that is cut in this way, and the weights after it."""
    backend = loaded(path, micro_batch_tokens=micro_batch_tokens, **algorithm)
    metrics = take_step(backend, [[groups[number] for number in chunk] for chunk in cut], VERSION)
    return metrics, {name: weight.clone() for name, weight in backend.export()}


def assert_same_step(
    one: tuple[dict[str, float], dict[str, torch.Tensor]], other: tuple[dict[str, float], dict[str, torch.Tensor]]
) -> None:
    """Within the order of float32 sums: at most 1e-6 of a metric and 1.2e-7 of a weight where this was measured."""
    (metrics, weights), (others, other_weights) = one, other
    expected = {name: value for name, value in others.items() if name not in OF_THE_CUT}
    found = {name: value for name, value in metrics.items() if name not in OF_THE_CUT}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)
    assert found["num_measured_tokens"] == expected["num_measured_tokens"]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_step_is_the_same_for_every_cut_and_order(
    tiny_model_path: Path, groups: list[TrainGroup], name: str
) -> None:
    """All groups at once; each by itself, with each sample in a row of its own; and in another order with groups
    without a signal first, in rows that cut groups in two."""
    axes = ALGORITHMS[name]
    whole = stepped(tiny_model_path, groups, WHOLE, **axes)
    start = dict(loaded(tiny_model_path).export())
    assert max(float((weight - start[key]).abs().max()) for key, weight in whole[1].items()) > 5e-4
    alone = stepped(tiny_model_path, groups, [[0], [1], [2], [3], [4]], micro_batch_tokens=1, **axes)
    assert_same_step(alone, whole)
    halves = stepped(tiny_model_path, groups, [[4, 3], [2], [1, 0]], micro_batch_tokens=HALF_A_GROUP, **axes)
    assert_same_step(halves, whole)
    assert whole[0]["shared_token_fraction"] > halves[0]["shared_token_fraction"] > alone[0]["shared_token_fraction"]


def test_one_order_and_cut_gives_the_same_bits_again(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """As a replay needs it."""
    cut = [[4, 1], [0], [3, 2]]
    (metrics, weights), (again, weights_again) = (stepped(tiny_model_path, groups, cut) for _ in range(2))
    assert (metrics["loss"], metrics["grad_norm"]) == (again["loss"], again["grad_norm"])
    assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["tis", "regularised", "m2po", "normalised"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_without_finite_numbers_is_taken_out_of_the_sum(
    tiny_model_path: Path, groups: list[TrainGroup], name: str, place: int
) -> None:
    """Wherever the group comes whose forward pass gives no number: the step is that of one chunk without it."""
    [image] = groups[0].sequences[0].images
    broken = replace(image, pixel_values_PD=torch.full_like(image.pixel_values_PD, math.nan))
    bad = replace(groups[0], samples=tuple((replace(each, images=(broken,)),) for each in groups[0].sequences))
    batch = [bad, *groups[1:]]
    cut = [[1, 3], [2, 4]]
    cut.insert(place, [0])
    with structlog.testing.capture_logs() as logs:
        found = stepped(tiny_model_path, batch, cut, **ALGORITHMS[name])
    assert found[0]["num_groups_skipped"] == 1
    assert [(entry["event"], entry["index"]) for entry in logs] == [("group.skipped", 0)]
    assert_same_step(found, stepped(tiny_model_path, batch, WHOLE, **ALGORITHMS[name]))


def test_an_aborted_step_leaves_nothing(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """The next step is that of a backend which never began the other."""
    backend = loaded(tiny_model_path)
    before = backend.digests()
    backend.begin_step(VERSION)
    backend.accumulate(groups[:2])
    assert backend.digests() == before
    backend.abort_step()
    take_step(backend, [groups], VERSION)
    fresh = loaded(tiny_model_path)
    take_step(fresh, [groups], VERSION)
    assert backend.digests() == fresh.digests()


def test_a_checkpoint_written_beside_a_step_is_of_the_moment_before(
    tiny_model_path: Path, groups: list[TrainGroup], tmp_path: Path
) -> None:
    """Weights, averages, reference, entropy coefficient and random state: whatever the step has computed or drawn."""
    settings: dict[str, Any] = {"kl": {"kind": "k3"}, "entropy": {"kind": "target", "coef": 0.01}}
    backend = loaded(tiny_model_path, **settings)
    take_step(backend, [groups], VERSION)
    (tmp_path / "between").mkdir()
    backend.save(tmp_path / "between")
    backend.begin_step(VERSION)
    backend.accumulate(groups[:2])
    torch.rand(3)
    drawn = backend.digests().random_state
    (tmp_path / "beside").mkdir()
    backend.save(tmp_path / "beside")
    after = []
    for folder in ("between", "beside"):
        resumed = loaded(tiny_model_path, tmp_path / folder, **settings)
        start = resumed.digests()
        after.append((start, take_step(resumed, [groups], VERSION)["loss"], resumed.digests()))
    assert after[0] == after[1]
    assert after[0][0].random_state != drawn, "the draw would have been seen"


def test_a_step_that_fails_is_aborted(tiny_model_path: Path, groups: list[TrainGroup]) -> None:
    """So that another one can be taken; a second one beside it is an error of the caller."""
    backend = loaded(tiny_model_path)
    with pytest.raises(TypeError):
        take_step(backend, [groups, None], VERSION)  # type: ignore[list-item]
    backend.begin_step(VERSION)
    with pytest.raises(ValueError, match="neither finished nor aborted"):
        backend.begin_step(VERSION)
    backend.abort_step()
    with pytest.raises(ValueError, match="no step was begun"):
        backend.accumulate(groups)


def test_every_kind_of_every_axis_comes_in_chunks() -> None:
    """But how a reference is refreshed, which comes after the step."""
    axes = [AlgorithmConfig.model_validate(algorithm) for algorithm in ALGORITHMS.values()]
    assert {key for key, _ in unseen_choices(axes)} <= {"kl.refresh"}


def test_what_depends_on_the_whole_batch_says_by_which_setting() -> None:
    """Each preset and variant; a loss that needs statistics of the batch is always among them."""
    axes = {name: AlgorithmConfig.model_validate(algorithm) for name, algorithm in ALGORITHMS.items()}
    found = {name: setting for name, config in axes.items() if (setting := whole_batch_setting(config))}
    assert found == {
        "decoupled_ppo": "algorithm.advantage.norm = 'batch'",
        "cispo": "algorithm.advantage.norm = 'batch_std'",
        "m2po": "algorithm.rejection.kind = 'm2po'",
        "reinforce_pp_baseline": "algorithm.advantage.kind = 'reinforce_pp_baseline'",
        "kl in reward": "algorithm.advantage.kind = 'reinforce_pp'",
        "normalised": "algorithm.correction.normalize = true",
        "normalised by samples": "algorithm.correction.normalize = true",
        "m2po, most kept": "algorithm.rejection.kind = 'm2po'",
        "opo": "algorithm.advantage.kind = 'custom'",
    }
    assert {name for name, config in axes.items() if needs_statistics(config)} <= set(found)
