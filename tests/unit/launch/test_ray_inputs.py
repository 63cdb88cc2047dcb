"""What a host of a Ray cluster says of the model, data and packages that its services would use, without Ray."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config import dump
from services.launch.on_ray.inputs_check import check
from services.recipe import Recipe


def checked(folder: Path, *services: str, **sections: Any) -> tuple[dict[str, str], list[str]]:
    """The answer of a host that has the launcher's working directory at `folder`."""
    return check(dump(Recipe.model_validate(sections)), services, str(folder), {})


@pytest.fixture
def model(tiny_model_path: Path) -> dict[str, str]:
    """The section of a model that is there."""
    return {"path": str(tiny_model_path)}


def data_of(folder: Path, *answers: str) -> dict[str, str]:
    """The section of a file in `folder` with these answers, by a relative path."""
    table = pa.table({"problem": ["?"] * len(answers), "answer": list(answers)})
    pq.write_table(table, folder / "rows.parquet")
    return {"path": "rows.parquet", "cache_dir": "cache"}


def test_a_host_that_has_everything_refuses_nothing(tmp_path: Path, model: dict[str, str]) -> None:
    """Relative paths are those of the launcher's working directory."""
    services = ("rollout", "trainer", "worker")
    assert checked(tmp_path, *services, model=model, data=data_of(tmp_path, "1", "2")) == ({}, [])


def test_a_host_without_the_data_is_no_place_for_the_trainer(tmp_path: Path, model: dict[str, str]) -> None:
    """Engines and workers need none."""
    missing = {"path": "rows.parquet"}
    reasons, _ = checked(tmp_path, "rollout", "trainer", "worker", model=model, data=missing)
    assert reasons.keys() == {"trainer"}
    assert reasons["trainer"].startswith("data.path = 'rows.parquet': there is no such file; give a file (.parquet")


def test_a_host_without_the_model_is_no_place_for_any(tmp_path: Path) -> None:
    """Each says so by itself."""
    nowhere = {"path": str(tmp_path / "nowhere")}
    reasons, _ = checked(tmp_path, "rollout", "trainer", "worker", model=nowhere, data=data_of(tmp_path, "1"))
    assert reasons.keys() == {"rollout", "trainer", "worker"}
    assert all(f"model.path = '{tmp_path}/nowhere'" in reason for reason in reasons.values())


def test_a_wrong_row_is_named(tmp_path: Path, model: dict[str, str]) -> None:
    """By its file and number, as without Ray."""
    reasons, _ = checked(tmp_path, "trainer", model=model, data=data_of(tmp_path, "1", ""))
    assert "rows.parquet', row 1: column 'answer' holds empty text" in reasons["trainer"]


@pytest.mark.parametrize(
    ("service", "package"), [("rollout", "sglang"), ("trainer", "pyarrow"), ("worker", "transformers")]
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, model: dict[str, str], monkeypatch: pytest.MonkeyPatch, service: str, package: str
) -> None:
    """Of the service that needs it."""
    monkeypatch.setitem(sys.modules, package, None)
    reasons, _ = checked(tmp_path, service, model=model)
    assert reasons == {
        service: f"the Python package {package!r} is not installed there; `pip install 'penstock[{service}]'`"
    }


@pytest.mark.parametrize(
    ("kind", "key"), [("environments", "class"), ("agents", "function")], ids=["environment", "agent"]
)
def test_code_of_the_recipe_s_own_that_is_not_found_is_named(
    tmp_path: Path, model: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str, key: str
) -> None:
    """Nothing of it is imported, so what is found is not run."""
    worker = {kind: {"mine": {key: "mine_of_a_person.inner:Name"}}}
    reasons, _ = checked(tmp_path, "rollout", "worker", model=model, worker=worker)
    assert reasons.keys() == {"worker"}
    assert reasons["worker"].startswith(
        f"worker.{kind}.mine.{key} = 'mine_of_a_person.inner:Name': the Python package 'mine_of_a_person' is not found"
    )
    worker = {kind: {"mine": {key: "__main__:Name"}}}  # which has no place in a process of its own
    reasons, _ = checked(tmp_path, "worker", model=model, worker=worker)
    assert "the Python package '__main__' is not found there" in reasons["worker"]
    worker = {kind: {"mine": {key: "mine_of_a_person.inner:Name"}}}
    (tmp_path / "mine_of_a_person").mkdir()
    (tmp_path / "mine_of_a_person/__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert checked(tmp_path, "worker", model=model, worker=worker) == ({}, [])
