"""The compose stack under test: a project of its own on a real Docker engine, of which nothing is left afterwards."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "deploy" / "docker-compose.yml"
PAIRS_FILE = ROOT / "deploy" / "docker-compose.disaggregated.yml"
SERVICES = ("nats", "reward", "router", "worker", "rollout", "trainer")

_POLL_S = 0.5


def missing() -> str:
    """Why there can be no stack here; empty: there can."""
    if shutil.which("docker") is None:
        return "no docker on PATH"
    if _run(["docker", "info"], check=False).returncode != 0:
        return "no Docker engine answers (`docker info`)"
    return "" if compose_command() else "neither `docker compose` nor `docker-compose` is installed"


def compose_command() -> list[str]:
    """Compose v2 where there is one, else docker-compose; empty: neither."""
    if _run(["docker", "compose", "version"], check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


@dataclass(slots=True)
class Stack:
    """One project. Its ports are free ones, so that it can run beside a stack that is in use."""

    project: str
    environment: dict[str, str]
    env_file: Path
    """Without a line: in place of deploy/.env, which is for the stack in use."""
    files: tuple[Path, ...]
    """Of compose, the first one the base."""

    def compose(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Run compose on this project and return what it printed on standard output."""
        files = [part for path in self.files for part in ("--file", str(path))]
        options = ("--env-file", str(self.env_file), "--project-name", self.project, *files)
        command = [*compose_command(), *options, *arguments]
        return _run(command, environment=self.environment, timeout_s=timeout_s).stdout

    def port(self, variable: str) -> int:
        """The published port that `variable` of .env.example sets."""
        return int(self.environment[variable])

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, ended ones included; by number."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        filters = [part for label in labels for part in ("--filter", f"label={label}")]
        found = _run(["docker", "ps", "--all", "--quiet", "--no-trunc", *filters]).stdout.split()
        return sorted(
            found, key=lambda each: int(inspect(each)["Config"]["Labels"]["com.docker.compose.container-number"])
        )

    def rows(self, run: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Finished steps of the run, or the lines of another file of its folder, also after the trainer's end."""
        (trainer,) = self.containers("trainer") or [""]
        source = f"{trainer}:/penstock/runs/{run}/{file}"
        archive = subprocess.run(["docker", "cp", source, "-"], capture_output=True, check=False, timeout=60)
        if archive.returncode != 0:
            return []
        text = subprocess.run(["tar", "-xO"], input=archive.stdout, capture_output=True, check=True, timeout=60).stdout
        return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]

    def logs(self, *services: str, lines: int = 25) -> str:
        """The end of what the services have said, for a failed assertion."""
        return self.compose("logs", "--no-color", f"--tail={lines}", *services)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Wait for something, but not for a run that has ended; returns how many seconds it took."""
        started = time.monotonic()
        while not holds():
            ended = [each for each in self.containers("trainer") if health(each) == "exited"]
            if ended and holds():
                break
            if ended or time.monotonic() - started > timeout_s:
                why = "the trainer has ended" if ended else f"not within {timeout_s} s"
                raise AssertionError(f"waited for {what}: {why}\n{self.logs()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started


@contextmanager
def stack(*overrides: Path, **settings: str) -> Iterator[Stack]:
    """A project with `settings` as its environment; at the end its containers, networks and volumes are removed."""
    project = f"penstock-test-{uuid.uuid4().hex[:8]}"
    names = ("PENSTOCK_ROUTER_PORT", "PENSTOCK_ROUTER_HTTP_PORT", "PENSTOCK_REWARD_PORT", "PENSTOCK_REWARD_HTTP_PORT")
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "COMPOSE_PROJECT"))}
    with tempfile.NamedTemporaryFile(prefix=project, suffix=".env") as empty:  # docker-compose 1.29 takes no /dev/null
        tested = Stack(project, {**kept, **ports, **settings}, Path(empty.name), (COMPOSE_FILE, *overrides))
        try:
            yield tested
        finally:
            tested.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


def leftovers(project: str) -> list[str]:
    """What Docker still has of the project."""
    found = []
    for kind in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
        label = f"label=com.docker.compose.project={project}"
        found += _run(["docker", *kind, "--quiet", "--filter", label]).stdout.split()
    return found


def inspect(container: str) -> dict[str, Any]:
    """What Docker knows of a container."""
    found: dict[str, Any] = json.loads(_run(["docker", "inspect", container]).stdout)[0]
    return found


def health(container: str) -> str:
    """starting, healthy or unhealthy; where it has ended, exited."""
    state = inspect(container)["State"]
    return str(state["Health"]["Status"]) if state["Running"] else "exited"


def crash(container: str) -> None:
    """kill -9 of the container's service: not `docker kill`, after which Docker would not start it again."""
    program = "import os; os.kill(min(int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) > 1), 9)"
    code = _run(["docker", "exec", container, "python3", "-c", program], check=False).returncode
    assert code in (0, 128 + 9), "the container may be gone, and the program with it, before that has ended"


def image_sizes() -> dict[str, int]:
    """Bytes of each service's image, layers that others share included."""
    return {
        name: int(json.loads(_run(["docker", "inspect", f"penstock-{name}"]).stdout)[0]["Size"]) for name in SERVICES
    }


def size_on_disk() -> int:
    """Bytes of all images together, each layer once."""
    layers: dict[str, int] = {}
    for name in SERVICES:
        history = _run(
            ["docker", "history", "--human=false", "--format", "{{.ID}} {{.Size}}", f"penstock-{name}"]
        ).stdout
        layers.update({image: int(size) for image, size in (line.split() for line in history.splitlines())})
    return sum(layers.values())


def _run(
    command: list[str], *, environment: Mapping[str, str] | None = None, check: bool = True, timeout_s: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done
