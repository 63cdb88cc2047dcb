"""What the images of the stack hold: the same layers where they begin alike, and what each service imports."""

import importlib.util
import re
import textwrap
import tomllib
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.integration.deploy.test_compose_files import BASE, DOCKER, ROOT, SERVICES, read, variables


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    """deploy/docker/requirements.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("requirements", DOCKER / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize("name", SERVICES)
def test_what_an_image_copies_is_readable(name: str) -> None:
    """For any user, though it may be the owner's alone in the checkout; pip opens what it installs from wheels."""
    image = (DOCKER / f"{name}.Dockerfile").read_text().rpartition("FROM ${BASE_IMAGE}\n")[2]
    copied = re.findall(r"^COPY (?!--from=).* (\S+)$", image, re.MULTILINE)
    opened = re.findall(r"chmod -R a\+rX (\S+)", image)
    assert [folder.rstrip("/") for folder in copied] == opened
    assert opened == (["/etc/nats"] if name == "nats" else [])


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


def test_the_transfer_wheels_are_the_extra_s(requirements: ModuleType) -> None:
    """The engine's image has what `disaggregation` in pyproject.toml names."""
    wanted = project()["optional-dependencies"]["disaggregation"]
    (given,) = re.findall(r'^ARG TRANSFER="(.*)"$', (DOCKER / "rollout.Dockerfile").read_text(), re.MULTILINE)
    assert wanted == given.split()
    assert variables(BASE.read_text())["PENSTOCK_TRANSFER"] == {given}


def test_the_documented_image_with_trackers_is_built_on_the_trainer_s(requirements: ModuleType) -> None:
    """From a file that builds see, with versions of the lock file, and with the trainer's user at its end."""
    document = (ROOT / "docs" / "operation" / "deploy.md").read_text()
    (lines,) = re.findall(r"^    (FROM .*\n(?:    .*\n)+)", document, re.MULTILINE)
    steps = [tuple(line.split(maxsplit=1)) for line in lines.splitlines()]
    trainer = (DOCKER / "trainer.Dockerfile").read_text()
    assert steps[0] == ("FROM", read(BASE)["services"]["trainer"]["image"].partition(":")[0])
    assert " ".join(steps[-1]) in trainer.splitlines()
    assert ("COPY", "requirements.lock /tmp/") in steps
    assert "!requirements.lock" in (ROOT / ".dockerignore").read_text().splitlines()
    assert ("RUN", "pip install --constraint /tmp/requirements.lock 'penstock[trackers]'") in steps
    assert {"mlflow-skinny", "tensorboard", "wandb"} <= pinned(requirements, "trackers")
    (override,) = re.findall(r"^    (services:\n(?:    .*\n)+)", document, re.MULTILINE)
    (added,) = yaml.safe_load(textwrap.dedent(f"    {override}"))["services"].values()
    assert added["build"] == {"dockerfile": "deploy/trackers.Dockerfile"}
    assert added["image"] != read(BASE)["services"]["trainer"]["image"].partition(":")[0]


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
