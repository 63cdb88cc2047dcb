"""How the container of nats starts: its token, and volumes that it cannot write."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.runtime.security import NATS_TOKEN, read_secret
from tests.integration.deploy.test_compose_files import DOCKER, ENVIRONMENT

UNPRIVILEGED = [] if os.geteuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Begins the command of a process to which the kernel refuses what it refuses to others; root's own goes through."""

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs deploy/docker/start-nats.sh with variables, on folders below `tmp_path`; its nats-server prints a line."""
    paths = {each: tmp_path / each for each in ("data", "secrets", "tmp", "etc")}
    for path in paths.values():
        path.mkdir()
    (paths["etc"] / "nats").mkdir()
    shutil.copy(DOCKER / "nats.conf", paths["etc"] / "nats")
    text = (DOCKER / "start-nats.sh").read_text()
    script = re.sub(r"(?<![\w.])/(data|secrets|tmp|etc)\b", lambda found: str(paths[found[1]]), text)
    server = tmp_path / "nats-server"
    server.write_text("#!/bin/sh\necho started\n")
    server.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(**more: str) -> "subprocess.CompletedProcess[str]":
        command = [*UNPRIVILEGED, "sh", "-c", script]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False, timeout=200)

    return run


def test_nats_on_volumes_of_another_user_says_what_to_do(tmp_path: Path, start: Start) -> None:
    """In one line, and before it draws a token that the others would not have. With a token in a file of its own it
    needs no folder for it."""
    data, secrets = tmp_path / "data", tmp_path / "secrets"
    assert start().stdout == "started\n"
    token = (secrets / "nats-token").read_bytes()
    assert start().stdout == "started\n"
    assert (secrets / "nats-token").read_bytes() == token
    (data / "jetstream").mkdir(mode=0o500)
    for path in (data / "jetstream", secrets / "nats-token", secrets):
        mode = path.stat().st_mode
        path.chmod(0o500)
        refused = start()
        path.chmod(mode | 0o200)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"error: {path} belongs to user ")
        assert "set PENSTOCK_UID" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert start().stdout == "started\n"
    given = tmp_path / "given"
    assert start(PENSTOCK_NATS_TOKEN_FILE=str(given)).returncode == 2
    given.write_text("of-the-cluster\n")
    secrets.chmod(0o500)  # a pod has none
    assert start(PENSTOCK_NATS_TOKEN_FILE=str(given)).stdout == "started\n"
    secrets.chmod(0o700)
    assert 'authorization { token: "of-the-cluster" }' in (tmp_path / "tmp" / "nats.conf").read_text()
    assert (secrets / "nats-token").read_bytes() == token


@pytest.mark.parametrize("written", ["a.b_c~d+e/f=-9", "a\r\n", "\n a\t\n"], ids=repr)
def test_nats_reads_a_file_as_the_services_do(written: str, tmp_path: Path, start: Start) -> None:
    """Without the whitespace around the token."""
    given = tmp_path / "given"
    given.write_bytes(written.encode())
    token = read_secret(NATS_TOKEN, {f"{NATS_TOKEN}_FILE": str(given)})
    assert start(PENSTOCK_NATS_TOKEN_FILE=str(given)).stdout == "started\n"
    assert f'authorization {{ token: "{token}" }}\n' in (tmp_path / "tmp" / "nats.conf").read_text()


@pytest.mark.parametrize("written", ["a\nb", "a b", 'a"b', "a\\b", "ä"], ids=repr)
def test_nats_refuses_a_token_that_the_services_refuse(written: str, tmp_path: Path, start: Start) -> None:
    """In the same words, from a file and from the variable."""
    given = tmp_path / "given"
    given.write_bytes(written.encode())
    with pytest.raises(ConfigError) as services:
        read_secret(NATS_TOKEN, {NATS_TOKEN: written})
    for refused in (start(PENSTOCK_NATS_TOKEN_FILE=str(given)), start(PENSTOCK_NATS_TOKEN=written)):
        assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"error: {services.value}\n")


def test_nats_refuses_a_file_without_a_token(tmp_path: Path, start: Start) -> None:
    """It draws none in its place, which nobody else would know."""
    given = tmp_path / "given"
    given.write_text("\r\n")
    refused = start(PENSTOCK_NATS_TOKEN_FILE=str(given))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("error: PENSTOCK_NATS_TOKEN_FILE = ")
