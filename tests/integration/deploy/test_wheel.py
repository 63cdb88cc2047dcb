"""The wheel, built as it is published and installed into an environment of its own."""

import ast
import email
import importlib.metadata
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import shipped
from tests.support.wheel import ROOT, build_wheel, run_apart

pytestmark = pytest.mark.slow

TINY = ROOT / "models" / "tiny-qwen3-vl"
PART_OF = {
    "annotated-types": "pydantic",
    "cuda-pathfinder": "cuda-bindings",
    "pydantic-core": "pydantic",
    "starlette": "fastapi",
    "latex2sympy2-extended": "math-verify",
    "sympy": "math-verify",
    "mpmath": "math-verify",
    "pyyaml": "huggingface-hub",
}
"""Distributions whose classes are part of another one's interface, which brings them."""
NAMED_BY_USERS = {"swanlab", "trackio"}
"""Trackers that no extra has, because they need older versions of other packages; see pyproject.toml."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and the packages that it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run_apart(folder / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (here,) = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    for name in required_by(wheel):
        tops = {path.parts[0] for path in importlib.metadata.files(name) or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(here / top)
    return folder / "bin"


def required_by(wheel: Path) -> set[str]:
    """The distributions that the wheel requires without an extra, and those that they require."""
    todo, found = declared_by(requires_of(wheel), ""), set[str]()
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= declared_by(importlib.metadata.requires(name) or [], "") - found
    return found


def requires_of(wheel: Path) -> list[str]:
    """The wheel's Requires-Dist lines."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])


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


def test_it_holds_every_file_of_its_packages(wheel: Path) -> None:
    """Also those that are no Python: the template of Slurm's jobs, the contracts' types, the pages of the viewer."""
    listed = ("git", "ls-files", "-z", "penstock", "services")
    tracked = {*filter(None, run_apart(*listed, cwd=ROOT).split("\0"))}
    with zipfile.ZipFile(wheel) as archive:
        assert tracked - {*archive.namelist()} == set()
    assert {"services/launch/slurm/job.sh.in", "services/view/static/index.html"} <= tracked


def test_its_environment_has_what_it_requires_alone(installed: Path, tmp_path: Path) -> None:
    """As an empty one into which pip installs it: no package of an extra is there, and none of the checkout's."""
    program = (
        "import importlib.util as u; "
        "print(*(name for name in ('grpc', 'pydantic', 'torch', 'fastapi', 'pytest', 'tests') if u.find_spec(name)))"
    )
    assert run_apart(installed / "python", "-c", program, cwd=tmp_path).split() == ["grpc", "pydantic"]


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


def imported(source: bytes) -> Iterator[tuple[str, str]]:
    """Modules that a file imports, at its top and inside functions, each with the extra that it needs; empty: any."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((each.name, "") for each in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from ((f"{module}.{each.name}", "") for each in names)
            case ast.Call(
                func=ast.Name(id="import_with_extra"),
                args=[ast.Constant(value=str(module)), *_],
                keywords=[ast.keyword(arg="extra", value=ast.Constant(value=str(extra)))],
            ):
                yield module, extra


def distributions_of(module: str, by_package: Mapping[str, list[str]]) -> set[str]:
    """Distributions that may bring a module; of several that share a package such as `google`, those with it."""
    package, _, rest = module.partition(".")
    found = set(by_package.get(package, ()))
    if len(found) > 1:
        folder, file = f"{package}/{rest.partition('.')[0]}/", f"{package}/{rest.partition('.')[0]}.py"
        found = {
            name
            for name in found
            if any(str(path) == file or str(path).startswith(folder) for path in importlib.metadata.files(name) or ())
        } or found
    return {canonicalize_name(name) for name in found} or {package}


def declared_by(lines: list[str], extra: str) -> set[str]:
    """Distributions that Requires-Dist lines bring with an extra."""
    found = set()
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found.add(canonicalize_name(requirement.name))
            if requirement.name == "penstock":
                found.update(*(declared_by(lines, each) for each in requirement.extras))
    return found


def test_every_package_that_is_imported_is_declared(wheel: Path) -> None:
    """By the wheel itself or one of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(metadata))
        imports = {(name, *found) for name in names if name.endswith(".py") for found in imported(archive.read(name))}
    lines, extras = about.get_all("Requires-Dist", []), {*about.get_all("Provides-Extra", [])} - {"dev"}
    declared = {extra: declared_by(lines, extra) for extra in extras}
    anywhere = set().union(*declared.values())
    by_package = importlib.metadata.packages_distributions()
    missing, needed = set(), set()
    for file, module, extra in imports:
        if module.partition(".")[0] in {"penstock", "services", *sys.stdlib_module_names}:
            continue
        brought = distributions_of(module, by_package) - NAMED_BY_USERS
        needed |= brought
        if brought and not {PART_OF.get(name, name) for name in brought} & (declared[extra] if extra else anywhere):
            missing.add((file, module, *brought))
    assert missing == set()
    assert {"grpcio", "math-verify", "pillow", "sglang", "torch"} <= needed, "the imports were found"
    assert set(PART_OF) <= needed, "nothing is excused that is not imported"
