"""`penstock plan`: what it prints of a recipe, and what it proposes where the GPUs are too small."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.cli import main
from services.plan import memory_plan, working_memory
from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, WorkingBytes

RECIPE = (
    "plan",
    "tiny-cpu",
    "--rollout.replicas=1",
    "--rollout.context_length=512",
    "--trainer.micro_batch_tokens=8192",
)


@pytest.fixture(autouse=True, scope="module")
def each_row_once() -> Iterator[None]:
    """All plans here are of one model, and many of one row."""
    count, known = working_memory.working_bytes, dict[tuple[Any, ...], WorkingBytes]()

    def working_bytes(shape: ModelShape, row: RowShape, **settings: Any) -> WorkingBytes:
        key = (row, *settings.items())
        if key not in known:
            known[key] = count(shape, row, **settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "working_bytes", working_bytes)
        yield


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    """Exit code and JSON of the plan."""
    code = main([*RECIPE, "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """A part for each thing that takes memory, and together what the process may take at most."""
    code, plan = planned(capsys, "--gpus=2x4")
    assert (code, plan["fits"], plan["remedy"]) == (0, True, [])
    assert planned(capsys, "--gpus=2x4", "--router.port=7001", "--reward.port=7001") == (0, plan)  # of several hosts
    engine, trainer = plan["processes"]  # type: ignore[misc]
    assert [engine["name"], trainer["name"]] == ["engine", "trainer"]
    weights = trainer["moments"][0]["bytes"]
    assert weights["weights in float32"] == weights["gradients"] == 4 * plan["num_parameters"]  # type: ignore[operator]
    assert main([*RECIPE, "--gpus=2x4"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith("qwen3_vl: 1.1 million parameters")
    start, step = plan["host"]  # type: ignore[misc]
    assert start["bytes"]["model in float32"] == 4 * plan["num_parameters"]  # type: ignore[operator]
    assert sum(start["bytes"].values()) > sum(step["bytes"].values())
    needed = sum(start["bytes"].values()) / 2**30
    assert text.endswith(f"it fits these GPUs, if the host has {needed:,.1f} GiB of memory\n")


@pytest.mark.variant
def test_the_remedy_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """What is proposed for GPUs that are too small fits them, and nothing of it could be left out."""
    code, plan = planned(capsys, "--gpus=2x2.15")
    assert (code, plan["fits"]) == (1, False)
    remedy = plan["remedy"]
    assert isinstance(remedy, list)
    assert remedy
    assert planned(capsys, "--gpus=2x2.15", *remedy)[0] == 0
    for setting in remedy:
        assert planned(capsys, "--gpus=2x2.15", *(other for other in remedy if other != setting))[0] == 1


@pytest.mark.slow
def test_nothing_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Said as it is."""
    assert main([*RECIPE, "--gpus=2x2"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("it does not fit, and none of the settings")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--gpus=8",), "--gpus '8' is not like 8x80"),
        (("--gpus=1x80", "--rollout.replicas=2"), "rollout.gpu_memory_fraction = "),
        (("--trainer.device=cpu",), "trainer.device = 'cpu', trainer.dtype = 'auto' and rollout.dtype = 'auto'"),
        (("--trainer.dtype=float32", "--rollout.dtype=float32"), "trainer.device = 'auto', trainer.dtype = 'float32'"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what to correct, before the model is read."""
    assert main([*RECIPE, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {error}")
    assert len(err.splitlines()) == 1
