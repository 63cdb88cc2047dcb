"""What `make test-helm-pods` needs is named before it builds anything. Part of `make test-helm`."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helm import pods


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root's, with every program, enough disk and no image."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pods, "_found", lambda name: True)
    monkeypatch.setattr(pods, "_has_images", lambda: False)
    monkeypatch.setattr(pods, "_STORAGE", tmp_path / "containers")
    has(monkeypatch, free_gb=25.5)


def has(monkeypatch: pytest.MonkeyPatch, *, free_gb: float) -> None:
    """Have the disk of podman's storage be this empty."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_gb * 1e9))


@pytest.mark.parametrize("program", ["podman", "runc", "netavark", "aardvark-dns", "catatonit"])
def test_a_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """With the packages of all of them."""
    assert pods.missing() == ""
    monkeypatch.setattr(pods, "_found", lambda name: name != program)
    assert pods.missing() == f"no {program}: apt-get install podman runc netavark aardvark-dns catatonit"


def test_too_little_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At first 25 GB; 12 where the images are there and built anew."""
    has(monkeypatch, free_gb=24.4)
    assert pods.missing() == f"{tmp_path} has 24 GB free, and building the images takes 25 GB: make room"
    monkeypatch.setattr(pods, "_has_images", lambda: True)
    assert pods.missing() == ""
    has(monkeypatch, free_gb=11.0)
    assert "takes 12 GB" in pods.missing()


def test_others_than_root_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their podman has no networks of its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert pods.missing().startswith("the pods are started by root")
