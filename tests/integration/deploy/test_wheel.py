"""The wheel, built as it is published and installed into an environment of its own."""

import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from penstock import shipped
from tests.support.wheel import ROOT, build_wheel, run_apart

pytestmark = pytest.mark.slow

TINY = ROOT / "models" / "tiny-qwen3-vl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, and with the packages that it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run_apart(folder / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    # Its requirements are those of this environment. The checkout, which is in this one as an editable installation,
    # stays out: of a folder that a .pth file names, the .pth files are not read.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_it_holds_the_packages_the_recipes_and_the_models(wheel: Path) -> None:
    """And nothing of tests, benchmarks and tools."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"penstock", "services"}
    assert [name for name in names if set(Path(name).parts) & {"tests", "bench", "tools"}] == []
    held = {name.removeprefix("penstock/shipped/") for name in names if name.startswith("penstock/shipped/")}
    recipes = {f"recipes/{file.name}" for file in shipped.recipes().values()}
    model = {f"models/{name}/{file.name}" for name, folder in shipped.models().items() for file in folder.iterdir()}
    assert held == {"__init__.py", "recipes/recipe.schema.json"} | recipes | model


def test_a_run_begins_anywhere(installed: Path, tmp_path: Path) -> None:
    """By the recipe's name, and from a copy: everything that the recipe names is found."""
    started = run_apart(installed / "penstock", "train", "tiny-cpu", "--dry-run", cwd=tmp_path)
    assert run_apart(installed / "penstock", "init", "tiny-cpu", cwd=tmp_path).startswith(
        "tiny-cpu.toml: edit it, then"
    )
    assert run_apart(installed / "penstock", "train", "tiny-cpu.toml", "--dry-run", cwd=tmp_path) == started
    assert "rollout-1" in started


def test_the_model_is_the_wheel_s(installed: Path, tmp_path: Path) -> None:
    """Not the checkout's, which this environment does not see."""
    program = "from penstock import shipped; print(*shipped.models().values(), *shipped.recipes().values(), sep='\\n')"
    for line in run_apart(installed / "python", "-c", program, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(installed.parent)
        assert Path(line).exists()
