"""A checkpoint is written by all ranks, and read by any number of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backend.files.file_plan import owners_of, plan_files, rounds_of_owners
from services.trainer.backend.ranks.many_ranks import _write_with_others
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.checkpoints import averages_of, tensors_of
from tests.support.trainer.families import MIXTURES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.test_ranks import assert_same, backend_of, steps_of, weights_of

_ALGORITHM = {"kl": {"kind": "k3", "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5}}


def saved(
    ranks: Ranks, path: Path, checkpoint: Path | None, folder: Path, seeds: list[int], **settings: Any
) -> tuple[str, list[str]]:
    """The digest of the weights after some steps from a checkpoint, of which all write another; and this rank's files.

    `settings` are the trainer's, and `algorithm` its own.
    """
    backend = backend_of(ranks, path, checkpoint, **{"algorithm": _ALGORITHM, **settings})
    steps_of(backend, path, seeds)
    if ranks.rank == 0:
        folder.mkdir()
    ranks.gather(None)
    written = backend.save(folder)
    ranks.gather(None)
    return backend.digests().weights, sorted(written)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """All but tensors of weights' shapes."""
    state: dict[str, Any] = torch.load(checkpoint / "trainer.pt", weights_only=True)
    return state


def assert_equal_files(one: Path, other: Path) -> None:
    """Both hold the same tensors, bit for bit, and the same settings, however they are cut into files."""
    for folder in ("model", "optimizer", "reference"):
        ours, theirs = tensors_of(one / folder), tensors_of(other / folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), folder
    for path in (one / "model").iterdir():
        if not path.name.startswith("model"):
            assert (other / "model" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_the_files_of_any_number_of_ranks_hold_the_same(four: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """What many read from one rank's checkpoint and write again is that checkpoint: weights, averages, reference."""
    saved(ALONE, tiny_model_path, None, tmp_path / "by one", [0])
    answers = four.run(saved, tiny_model_path, tmp_path / "by one", tmp_path / "by many", [])
    assert_equal_files(tmp_path / "by one", tmp_path / "by many")
    assert state_of(tmp_path / "by many")["optimizer"] == state_of(tmp_path / "by one")["optimizer"]
    files = [file for _, of_rank in answers for file in of_rank]
    assert len(files) == len(set(files))
    total = sum(path.stat().st_size for path in tmp_path.glob("by one/*/*.safetensors"))
    for _, of_rank in answers:
        sizes = [(tmp_path / "by many" / file).stat().st_size for file in of_rank if file.endswith(".safetensors")]
        assert sum(sizes) > 0.5 * total / len(answers)


@pytest.mark.slow
def test_a_checkpoint_is_of_no_number_of_ranks(
    two: RankPool, four: RankPool, tiny_model_path: Path, tmp_path: Path
) -> None:
    """What four have saved, two and one continue, and the other way round, as if nothing had been saved in between."""
    four.run(saved, tiny_model_path, None, tmp_path / "by four", [0])
    answers = four.run(saved, tiny_model_path, tmp_path / "by four", tmp_path / "four four", [1])
    assert len({digest for digest, _ in answers}) == 1
    assert answers == four.run(saved, tiny_model_path, None, tmp_path / "straight", [0, 1])
    assert_equal_files(tmp_path / "straight", tmp_path / "four four")
    two.run(saved, tiny_model_path, tmp_path / "by four", tmp_path / "four two", [1])
    saved(ALONE, tiny_model_path, tmp_path / "by four", tmp_path / "four one", [1])
    two.run(saved, tiny_model_path, None, tmp_path / "by two", [0])
    four.run(saved, tiny_model_path, tmp_path / "by two", tmp_path / "two four", [1])
    saved(ALONE, tiny_model_path, None, tmp_path / "by one", [0])
    four.run(saved, tiny_model_path, tmp_path / "by one", tmp_path / "one four", [1])
    saved(ALONE, tiny_model_path, None, tmp_path / "one one", [0, 1])
    expected = averages_of(tmp_path / "one one")
    for way in ("four four", "four two", "four one", "two four", "one four"):
        assert state_of(tmp_path / way)["optimizer"]["num_updates"] == 2
        found = averages_of(tmp_path / way)
        assert found.keys() == expected.keys()
        for name, averages in expected.items():
            for kind, value in averages.items():
                torch.testing.assert_close(found[name][kind], value, rtol=1e-3, atol=1e-6)
        assert_same((tensors_of(tmp_path / "one one/model"), []), (tensors_of(tmp_path / way / "model"), []))


def written_after_the_next_update(ranks: Ranks, path: Path, folder: Path) -> tuple[str, str, str]:
    """Digests: when shares are copied, when they are written, and of what is read."""
    backend = backend_of(ranks, path, algorithm=_ALGORITHM)
    steps_of(backend, path, [0])
    collected, before = backend.collect(), backend.digests()
    steps_of(backend, path, [1])
    if ranks.rank == 0:
        folder.mkdir()
    ranks.gather(None)
    backend.write(collected, folder)
    ranks.gather(None)
    resumed = backend_of(ranks, path, folder, algorithm=_ALGORITHM)
    after_resume = steps_of(resumed, path, [1])
    assert after_resume[0]["kl_reference"] != 0
    assert resumed.digests() == backend.digests()
    return (
        before.weights,
        backend.digests().weights,
        backend_of(ranks, path, folder, algorithm=_ALGORITHM).digests().weights,
    )


@pytest.mark.slow
def test_shares_are_copies(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """The next update may come while they are written: weights, averages and reference are of the moment before."""
    for copied, updated, read in two.run(written_after_the_next_update, tiny_model_path, tmp_path / "saved"):
        assert copied == read != updated


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_many_ranks_write_experts_as_published(four: RankPool, tmp_path: Path, kind: str) -> None:
    """The published names and layouts, with an index that says where each tensor is; one rank reads them."""
    path = write_model(heard(MIXTURES[kind](), std_of_embedding=0.3), tmp_path / kind)
    (tmp_path / "saved").mkdir()
    four.run(saved, path, None, tmp_path / "saved/by many", [])
    ours, theirs = tensors_of(tmp_path / "saved/by many/model"), tensors_of(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    index = json.loads((tmp_path / "saved/by many/model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())
    for name, file in index["weight_map"].items():
        assert name in tensors_of_file(tmp_path / "saved/by many/model" / file)
    assert index["weight_map"].keys() == ours.keys()
    resumed = weights_of(backend_of(ALONE, path, tmp_path / "saved/by many", algorithm=_ALGORITHM))
    assert all(torch.equal(weight, resumed[name]) for name, weight in weights_of(backend_of(ALONE, path)).items())


def tensors_of_file(file: Path) -> dict[str, torch.Tensor]:
    """Those of one file."""
    from safetensors.torch import load_file

    return load_file(file)


def refused(ranks: Ranks, folder: Path, error: Exception) -> str:
    """What writing raises on this rank where the last rank cannot write; nothing is empty."""

    class Backend:
        def write(self, collected: None, folder: Path) -> dict[str, str]:
            if ranks.rank == ranks.size - 1:
                raise error
            return {}

    try:
        _write_with_others(Backend(), None, folder, ranks)
    except (OSError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device", "model/x"), "OSError: [Errno 28] No space left on device: 'model/x'"),
        (ValueError("wrong"), "could not write its share of /nowhere: ValueError('wrong')"),
    ],
)
def test_a_rank_that_cannot_write_is_an_error_of_rank_0(four: RankPool, error: Exception, told: str) -> None:
    """With the number of the operating system's error, by which a full disk is known; and nobody waits for ever."""
    first, *others = four.run(refused, Path("/nowhere"), error)
    assert told in first
    assert set(others) == {""}


def test_shares_are_of_about_equal_size() -> None:
    """Neighbours stay together, so that a file has whole layers."""
    sizes = {f"layer.{number}": 10 for number in range(8)}
    assert list(owners_of(sizes, 4).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(owners_of({"embedding": 100, **sizes}, 2).values()) == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert owners_of({}, 3) == {}


def test_files_are_named_as_transformers_names_them() -> None:
    """One file without a number; cut by rank, and where the next tensor would make it too large."""
    sizes = {"a": 6, "b": 3, "c": 1, "d": 1}
    [alone] = plan_files("model", sizes, dict.fromkeys(sizes, 0))
    assert (alone.name, alone.tensors) == ("model.safetensors", ("a", "b", "c", "d"))
    planned = plan_files("model", sizes, {"a": 0, "b": 0, "c": 0, "d": 1}, max_bytes=4)
    assert [(file.rank, file.name, file.tensors) for file in planned] == [
        (0, "model-00001-of-00003.safetensors", ("a",)),
        (0, "model-00002-of-00003.safetensors", ("b", "c")),
        (1, "model-00003-of-00003.safetensors", ("d",)),
    ]


def test_every_rank_receives_at_most_one_tensor_in_a_round() -> None:
    """And its own in their order."""
    owners = {"a": 0, "b": 0, "c": 1, "d": 0, "e": 2}
    assert list(rounds_of_owners(owners)) == [("a", "c", "e"), ("b",), ("d",)]


def saved_with_divided_experts(ranks: Ranks, path: Path, checkpoint: Path | None, folder: Path, seed: int) -> str:
    """The digest of the weights after a step, of ranks of which each has half of the experts."""
    digest, _ = saved(ranks, path, checkpoint, folder, [seed], expert_parallel=2)
    return digest


@pytest.mark.slow
def test_checkpoints_of_divided_experts_are_those_of_one_rank(four: RankPool, tmp_path: Path) -> None:
    """One rank goes on from theirs, and they from one rank's, as if nothing had been saved in between."""
    path = write_model(heard(MIXTURES["qwen3_moe"](), std_of_embedding=0.3), tmp_path / "mixture")
    saved(ALONE, path, None, tmp_path / "straight", [0, 1])
    four.run(saved_with_divided_experts, path, None, tmp_path / "many", 0)
    saved(ALONE, path, tmp_path / "many", tmp_path / "many, one", [1])
    saved(ALONE, path, None, tmp_path / "one", [0])
    digests = four.run(saved_with_divided_experts, path, tmp_path / "one", tmp_path / "one, many", 1)
    assert len(set(digests)) == 1
    expected, averages = tensors_of(tmp_path / "straight" / "model"), averages_of(tmp_path / "straight")
    for way in ("many, one", "one, many"):
        found = tensors_of(tmp_path / way / "model")
        assert found.keys() == expected.keys()
        assert_same((expected, []), (found, []))
        of_way = averages_of(tmp_path / way)
        assert of_way.keys() == averages.keys()
        for name, of_weight in averages.items():
            for kind, value in of_weight.items():
                torch.testing.assert_close(of_way[name][kind], value, rtol=1e-3, atol=1e-6)
