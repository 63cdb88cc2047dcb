"""The wheel, built as it is published and installed into an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from penstock import shipped

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TINY = ROOT / "models" / "tiny-qwen3-vl"


def run(*command: str | Path, cwd: Path) -> str:
    """Run it to its end, with nothing that leads back to the checkout; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, and with the packages that it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    # Its requirements are those of this environment. The checkout, which is in this one as an editable installation,
    # stays out: of a folder that a .pth file names, the .pth files are not read.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_it_holds_the_packages_the_recipes_and_the_model(wheel: Path) -> None:
    """And nothing of tests, benchmarks and tools."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"penstock", "services"}
    assert [name for name in names if set(Path(name).parts) & {"tests", "bench", "tools"}] == []
    held = {name.removeprefix("penstock/shipped/") for name in names if name.startswith("penstock/shipped/")}
    recipes = {f"recipes/{file.name}" for file in shipped.recipes().values()}
    model = {f"models/{TINY.name}/{file.name}" for file in TINY.iterdir()}
    assert held == {"__init__.py", "recipes/recipe.schema.json"} | recipes | model


def test_a_run_begins_anywhere(installed: Path, tmp_path: Path) -> None:
    """By the recipe's name, and from a copy: everything that the recipe names is found."""
    started = run(installed / "penstock", "train", "tiny-cpu", "--dry-run", cwd=tmp_path)
    assert run(installed / "penstock", "init", "tiny-cpu", cwd=tmp_path).startswith("tiny-cpu.toml: edit it, then")
    assert run(installed / "penstock", "train", "tiny-cpu.toml", "--dry-run", cwd=tmp_path) == started
    assert "rollout-1" in started


def test_the_model_is_the_wheel_s(installed: Path, tmp_path: Path) -> None:
    """Not the checkout's, which this environment does not see."""
    program = "from penstock import shipped; print(*shipped.models().values(), *shipped.recipes().values(), sep='\\n')"
    for line in run(installed / "python", "-c", program, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(installed.parent)
        assert Path(line).exists()
