"""The files of the compose stack agree with each other, with the lock file, and with both generations of compose.

That they work is tested on a real Docker engine: `make test-compose`.
"""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from penstock import config as configuration
from services.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
BASE = DEPLOY / "docker-compose.yml"
OVERRIDES = (DEPLOY / "docker-compose.gpu.yml", DEPLOY / "docker-compose.disaggregated.yml")
SERVICES = ("nats", "reward", "router", "rollout", "worker", "trainer")
KNOWN_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "environment", "image", "init", "logging", "mem_limit",
    "ports", "read_only", "restart", "scale", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "user",
    "volumes",
}  # fmt: skip
"""Of a service, of the same meaning in docker-compose 1.29 and in today's compose specification."""


def read(path: Path) -> dict[str, Any]:
    """The file, with its anchors resolved and its variables as they are."""
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def variables(text: str) -> dict[str, set[str]]:
    """Variables that compose fills in, each with the defaults that it has."""
    found: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text):
        found.setdefault(name, set()).add(default)
    assert len(re.findall(r"\$\{?[A-Za-z]", text)) == len(re.findall(r"\$\{[A-Z_]+:-[^}]*\}", text)), (
        "one has no default"
    )
    return found


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    """deploy/docker/requirements.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("requirements", DOCKER / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", [BASE, *OVERRIDES], ids=lambda path: path.name)
def test_compose_old_and_new_know_every_key(path: Path) -> None:
    """No top-level `name`, no `version`, and of services only what both read alike."""
    content = read(path)
    assert {key for key in content if not key.startswith("x-")} <= {"services", "volumes"}
    for name, service in content["services"].items():
        assert service.keys() <= KNOWN_KEYS, name


@pytest.mark.parametrize("files", [[BASE], [BASE, OVERRIDES[0]], [BASE, OVERRIDES[1]]], ids=["base", "gpu", "pairs"])
def test_the_installed_compose_takes_the_files(files: list[Path]) -> None:
    """docker-compose 1.29 checks them against the JSON schema of the compose specification, as v2 does."""
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    if (
        subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        if shutil.which(command[0])
        else 1
    ):
        pytest.skip("no compose is installed")
    arguments = [part for path in files for part in ("--file", str(path))]
    done = subprocess.run([*command, *arguments, "config", "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_example_names_every_variable_with_its_default() -> None:
    """deploy/.env.example: nothing that is used is missing, nothing that is there is unused, and defaults agree."""
    documented = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    base = variables(BASE.read_text())
    used = base | {
        name: base.get(name, defaults) for path in OVERRIDES for name, defaults in variables(path.read_text()).items()
    }
    read_by_compose_itself = {"COMPOSE_PROJECT_NAME", "COMPOSE_FILE"}
    assert documented.keys() - read_by_compose_itself == used.keys()
    for name, defaults in used.items():
        assert len(defaults) == 1, f"{name} has several defaults: {defaults}"
        if name != "PENSTOCK_ARGS":  # by default none; the example shows some
            assert {documented[name]} == defaults, name


def test_ports_are_published_on_this_machine_only() -> None:
    """Nobody else on the network reaches the stack, and nobody at all its NATS, engines and trainer."""
    published = {name: service["ports"] for name, service in read(BASE)["services"].items() if "ports" in service}
    assert published.keys() == {"reward", "router"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert not any("ports" in service for path in OVERRIDES for service in read(path)["services"].values())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_bounded_and_watched(name: str) -> None:
    """Not root, nothing to write on, no capability; limits of memory and log; a health check and time to stop."""
    service = read(BASE)["services"][name]
    assert service["user"].startswith("${PENSTOCK_UID:-10001}")
    assert service["read_only"]
    assert service["init"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert {"mem_limit", "stop_grace_period"} <= service.keys()
    assert service["restart"] == ("on-failure" if name == "trainer" else "unless-stopped")
    dockerfile = (DOCKER / f"{name}.Dockerfile").read_text()
    assert "HEALTHCHECK" in dockerfile
    assert "USER 10001:10001" in dockerfile


def test_a_service_has_time_for_its_grace_period() -> None:
    """Docker kills after `stop_grace_period`; what a service does by itself before its end fits in."""
    services = read(BASE)["services"]
    for recipe_file in sorted((ROOT / "recipes").glob("*.toml")):
        recipe = Recipe.model_validate(tomllib.loads(recipe_file.read_text()) | {"model": MODEL, "data": {}})
        for name in ("rollout", "worker", "router", "reward"):
            seconds = int(services[name]["stop_grace_period"].removesuffix("s"))
            assert seconds >= getattr(recipe, name).grace_s + 10, (recipe_file.name, name)


MODEL = {"path": ROOT / "models" / "tiny-qwen3-vl"}


def test_the_recipe_for_gpus_is_sound(tmp_path: Path) -> None:
    """All its keys and values are valid; its model and data are the reader's to fetch."""
    data = tmp_path / "train.parquet"
    data.touch()
    overrides = [f"--model.path={MODEL['path']}", f"--data.path={data}"]
    recipe = configuration.load(Recipe, ROOT / "recipes" / "qwen3-vl-2b-geo3k.toml", overrides)
    assert recipe.data.profile == "geo3k"


def test_engines_of_all_roles_run_alike() -> None:
    """The override with prefill and decode repeats what compose cannot extend; it must not fall behind."""
    unified = read(BASE)["services"]["rollout"]
    for role in ("prefill", "decode"):
        engine = read(OVERRIDES[1])["services"][role]
        assert f"--rollout.role={role}" in engine["command"]
        apart = {"build", "command", "scale"}
        assert {key: value for key, value in engine.items() if key not in apart} == {
            key: value for key, value in unified.items() if key not in apart
        }


def test_images_begin_alike() -> None:
    """What all Dockerfiles, and what the two heavy ones, have in common is the same line for line: built once."""
    text = {name: (DOCKER / f"{name}.Dockerfile").read_text() for name in SERVICES if name != "nats"}
    shared = {name: each[each.index("ARG BASE_IMAGE") : each.index("ENV PIP_NO", each.index("FROM ${BASE_IMAGE}\n"))]
              for name, each in text.items()}  # fmt: skip
    assert len(set(shared.values())) == 1
    heavy = {text[name][text[name].index("FROM ${BASE_IMAGE}\n") :].partition("COPY --from=project /pins/rollout")[0]
             .partition("COPY --from=project /pins/trainer")[0] for name in ("rollout", "trainer")}  # fmt: skip
    assert len(heavy) == 1
    assert "/pins/torch.txt" in heavy.pop()


@pytest.mark.parametrize("extra", ["reward", "openai", "worker"])
def test_small_images_hold_no_torch(requirements: ModuleType, extra: str) -> None:
    """Nor SGLang, nor anything of CUDA's."""
    names = pinned(requirements, extra)
    assert "grpcio" in names
    assert not {name for name in names if name.startswith(("torch", "sglang", "nvidia", "triton"))}


def test_heavy_images_hold_what_their_service_imports(requirements: ModuleType) -> None:
    """The engine SGLang, the trainer torch without SGLang; both the same torch, which is in a layer of its own."""
    torch = set(requirements.closure((ROOT / "requirements.lock").read_text(), {"torch", "torchvision"}))
    assert {"sglang", "torch", "safetensors"} <= pinned(requirements, "rollout")
    assert {"accelerate", "torch", "transformers"} <= pinned(requirements, "trainer")
    assert "sglang" not in pinned(requirements, "trainer")
    assert {requirements.normalised(pin) for pin in torch} <= pinned(requirements, "trainer") & pinned(
        requirements, "rollout"
    )


def test_the_closure_is_read_from_the_lock_file(requirements: ModuleType) -> None:
    """Everything that a root came with, directly or not, and nothing else; a root that is not locked is an error."""
    direct = "# via penstock (pyproject.toml)"
    lock = f"a==1  {direct}\nb==2  # via a\nc==3  # via b, d\nd==4  {direct}\n"
    assert requirements.closure(lock, {"a"}) == ["a==1", "b==2", "c==3"]
    assert requirements.closure(lock, {"d"}) == ["c==3", "d==4"]
    with pytest.raises(ValueError, match="no e; run `make lock`"):
        requirements.closure(lock, {"e"})


def test_the_transfer_wheel_is_the_extra_s(requirements: ModuleType) -> None:
    """The engine's image has what `disaggregation` in pyproject.toml names."""
    (wanted,) = project()["optional-dependencies"]["disaggregation"]
    (given,) = re.findall(r"^ARG TRANSFER=(.*)$", (DOCKER / "rollout.Dockerfile").read_text(), re.MULTILINE)
    assert wanted.partition(";")[0].strip() == given


def project() -> dict[str, Any]:
    """[project] of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def pinned(requirements: ModuleType, extra: str) -> set[str]:
    """Names of the packages that the image of `extra` installs."""
    wanted = {
        requirements.normalised(each) for each in project()["dependencies"] + project()["optional-dependencies"][extra]
    }
    pins = requirements.closure((ROOT / "requirements.lock").read_text(), wanted)
    return {requirements.normalised(pin) for pin in pins}
