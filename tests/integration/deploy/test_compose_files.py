"""The files of the compose stack agree with each other and with both generations of compose.

That they work is tested on a real Docker engine: `make test-compose`.
"""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import config as configuration
from penstock.runtime.ports import free_ports
from services.launch.launcher import KILL_MARGIN_S
from services.recipe import Recipe
from services.reward.server import OVERTIME_MEMORY_BYTES
from services.router.tuning import OpenAITuning
from tests.compose import stack

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
DOCKER = DEPLOY / "docker"
BASE = DEPLOY / "docker-compose.yml"
OBSERVABILITY = DEPLOY / "docker-compose.observability.yml"
OVERRIDES = (
    DEPLOY / "docker-compose.gpu.yml",
    DEPLOY / "docker-compose.disaggregated.yml",
    DEPLOY / "docker-compose.gpu-disaggregated.yml",
)
SERVICES = ("nats", "reward", "router", "rollout", "worker", "trainer")
KNOWN_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment", "image", "init", "logging",
    "mem_limit", "ports", "read_only", "restart", "scale", "security_opt", "shm_size", "stop_grace_period", "tmpfs",
    "user", "volumes",
}  # fmt: skip
"""Of a service, of the same meaning in docker-compose 1.29 and in today's compose specification."""


ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "COMPOSE_", "MAKE"))
}
"""This process's, without what tells compose or make something else."""


def installed_compose() -> list[str]:
    """docker-compose, or else Compose v2; where there is neither, the test is skipped."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    pytest.skip("no compose is installed")


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


@pytest.mark.parametrize("path", [BASE, *OVERRIDES, OBSERVABILITY], ids=lambda path: path.name)
def test_compose_old_and_new_know_every_key(path: Path) -> None:
    """No top-level `name`, no `version`, and of services only what both read alike."""
    content = read(path)
    assert {key for key in content if not key.startswith("x-")} <= {"services", "volumes"}
    for name, service in content["services"].items():
        assert service.keys() <= KNOWN_KEYS, name


@pytest.mark.parametrize(
    "files",
    [
        [BASE],
        [BASE, OVERRIDES[0]],
        [BASE, OVERRIDES[1]],
        [BASE, OBSERVABILITY],
        [BASE, *OVERRIDES, OBSERVABILITY],
    ],
    ids=["base", "gpu", "pairs", "observability", "all"],
)
def test_the_installed_compose_takes_the_files(files: list[Path]) -> None:
    """docker-compose 1.29 checks them against the JSON schema of the compose specification, as v2 does."""
    arguments = [part for path in files for part in ("--file", str(path))]
    command = [*installed_compose(), *arguments, "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["up", "down", "logs"])
def test_make_acts_on_the_files_that_env_names(target: str, tmp_path: Path) -> None:
    """Not on docker-compose.yml alone, whatever deploy/.env says; the project's name stays that of the folder."""
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns(".env"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "deploy" / ".env").write_text("COMPOSE_FILE=docker-compose.yml:docker-compose.disaggregated.yml\n")
    told = f"COMPOSE=basename $$PWD; {' '.join(installed_compose())} config --services #"
    command = ["make", "--silent", "--directory", str(tmp_path), target, told]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    name, *services = done.stdout.split()
    assert name == "deploy"
    assert set(services) == {*SERVICES, "prefill", "decode"}


def test_a_stack_under_test_is_not_the_one_in_use(tmp_path: Path) -> None:
    """`make test-compose` reads nothing of deploy/.env."""
    installed_compose()
    shutil.copy(BASE, tmp_path)
    (tmp_path / ".env").write_text("PENSTOCK_TAG=in-use\n")
    (tmp_path / "empty").touch()
    files = (tmp_path / BASE.name,)
    config = stack.Stack("penstock-test", ENVIRONMENT, tmp_path / "empty", files).compose("config")
    assert "penstock-nats:latest" in config
    assert "in-use" not in config


def test_the_example_names_every_variable_with_its_default() -> None:
    """deploy/.env.example: nothing that is used is missing, nothing that is there is unused, and defaults agree."""
    documented = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    base = variables(BASE.read_text())
    used = base | {
        name: base.get(name, defaults)
        for path in (*OVERRIDES, OBSERVABILITY)
        for name, defaults in variables(path.read_text()).items()
    }
    read_by_compose_itself = {"COMPOSE_PROJECT_NAME", "COMPOSE_FILE"}
    assert documented.keys() - read_by_compose_itself == used.keys()
    for name, defaults in used.items():
        assert len(defaults) == 1, f"{name} has several defaults: {defaults}"
        if name != "PENSTOCK_ARGS":  # by default none; the example shows some
            assert {documented[name]} == defaults, name


def test_every_service_is_given_the_certificates() -> None:
    """Those of the base file and of the pairs; and nats-server, which has no Python, its arguments."""
    for path in (BASE, OVERRIDES[1]):
        for name, service in read(path)["services"].items():
            assert "image" not in service or "${PENSTOCK_CERTS:-certs}:/certs:ro" in service["volumes"], name
    assert read(BASE)["services"]["nats"]["command"] == "${PENSTOCK_NATS_ARGS:-}"


def test_ports_are_published_on_this_machine_only() -> None:
    """Nobody else on the network reaches the stack, and nobody at all its NATS, engines and trainer."""
    published = {name: service["ports"] for name, service in read(BASE)["services"].items() if "ports" in service}
    assert published.keys() == {"reward", "router"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    for service in read(OBSERVABILITY)["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
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
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n(.*)$", dockerfile, re.MULTILINE)
    assert name == "nats" or check.endswith(" $PENSTOCK_HEALTH_ARGS")
    assert "USER 10001:10001" in dockerfile


def test_documented_commands_run_in_services_that_stay_up() -> None:
    """The trainer is down when its run has ended, or failed."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    services = read(BASE)["services"]
    named = {*re.findall(r"compose exec ([a-z]+)", text)}
    assert named
    assert {services[name]["restart"] for name in named} == {"unless-stopped"}


def test_a_new_owner_takes_over_every_volume() -> None:
    """By the last commands of deploy.md: the caches are removed, and other volumes that are written are chowned."""
    commands = (ROOT / "docs" / "operation" / "deploy.md").read_text().partition("Volumes belong to the user")[2]
    volumes = [name for path in (BASE, *OVERRIDES) for name in read(path).get("volumes", {})]
    read_only = {"data", "hf", "certs"}
    assert {*re.findall(r"deploy_([a-z-]+)", commands)} == {*volumes} - read_only


def test_a_service_has_time_for_its_grace_period() -> None:
    """Docker kills after `stop_grace_period`; what a service does by itself before its end fits in."""
    services = read(BASE)["services"]
    for recipe_file in sorted((ROOT / "recipes").glob("*.toml")):
        recipe = Recipe.model_validate(tomllib.loads(recipe_file.read_text()) | {"model": MODEL, "data": {}})
        for name in ("rollout", "worker", "router", "reward"):
            seconds = int(services[name]["stop_grace_period"].removesuffix("s"))
            assert seconds >= recipe.run.grace_s + KILL_MARGIN_S, (recipe_file.name, name)
    for path, checkpoint_gb in ((BASE, 0.02), (OVERRIDES[0], 24)):  # of 2 billion parameters, with Adam's moments
        seconds = int(read(path)["services"]["trainer"]["stop_grace_period"].removesuffix("s"))
        assert seconds >= checkpoint_gb * 1000 / SLOW_DISK_MB_PER_S + STEP_S, path.name


SLOW_DISK_MB_PER_S = 30
STEP_S = 60


def test_the_token_reaches_every_service() -> None:
    """One that missed it would let everybody in. The other tokens go only where they are used."""
    files = [read(path)["services"] for path in (BASE, *OVERRIDES)]
    environments: dict[str, dict[str, Any]] = {}
    for services in files:
        for name, service in services.items():
            environments.setdefault(name, {}).update(service.get("environment", {}))
    assert environments.keys() == {*SERVICES, "prefill", "decode"}
    for name, environment in environments.items():
        if name != "nats":
            assert environment["PENSTOCK_TOKEN"] == "${PENSTOCK_TOKEN:-}", name
            assert environment["PENSTOCK_HEALTH_ARGS"] == "${PENSTOCK_HEALTH_ARGS:-}", name
            # A worker runs other people's environments, which must not change weights.
            has_control = "PENSTOCK_NATS_TOKEN_FILE" in environment and name != "worker"
            assert environment.get("PENSTOCK_CONTROL_TOKEN") == (
                "${PENSTOCK_CONTROL_TOKEN:-}" if has_control else None
            ), name
    for token, holder in (("PENSTOCK_REMOTE_TOKEN", "reward"), ("PENSTOCK_ENVIRONMENT_TOKEN", "worker")):
        assert {name for name, environment in environments.items() if token in environment} == {holder}
        assert environments[holder][token] == f"${{{token}:-}}"


def test_what_a_service_may_take_fits_its_memory_limit() -> None:
    """Bodies of HTTP requests, worker processes, and a quarter of a GiB for the processes themselves."""
    services = read(BASE)["services"]
    limits_mb = {name: int(re.findall(r"(\d+)g", services[name]["mem_limit"])[0]) * 1024 for name in SERVICES}
    for path in (BASE, OVERRIDES[0]):
        command = read(path)["services"]["reward"]["command"]
        (given,) = re.findall(r"(--reward\.http_max_body_mb=\S+) \$\{PENSTOCK_ARGS", command)
        reward = configuration.load(Recipe, (), [given]).reward
        bodies_mb = 2 * reward.http_max_body_mb * 10  # once they are read as JSON
        assert bodies_mb + OVERTIME_MEMORY_BYTES / 2**20 + 256 <= limits_mb["reward"], path.name
    assert 2 * OpenAITuning().max_body_bytes / 2**20 * 10 + 256 <= limits_mb["router"]


def test_a_proxy_of_the_environment_does_not_hear_of_health() -> None:
    """The health check of nats asks its own container, whatever HTTP_PROXY says; docker hands that to containers."""
    (json_command,) = re.findall(r"CMD (\[.*?\])\n", (DOCKER / "nats.Dockerfile").read_text(), re.DOTALL)
    command = json.loads(json_command.replace("\\\n", ""))

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (nobody,) = free_ports(1)
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), f"http://127.0.0.1:{nobody}")
    kept = {name: value for name, value in ENVIRONMENT.items() if name.lower() != "no_proxy"}
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = [sys.executable, *(part.replace(":8222", f":{server.server_port}") for part in command[1:])]
        done = subprocess.run(asked, env=kept | proxies, capture_output=True, text=True, check=False, timeout=200)
        server.shutdown()
    assert done.returncode == 0, done.stderr


def test_prometheus_finds_every_service_of_the_stack() -> None:
    """By its name, on the port that its image serves metrics on, to the whole network of the stack."""
    job = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]["dns_sd_configs"][0]
    assert set(job["names"]) == {*SERVICES, "prefill", "decode"} - {"nats"}
    for name in set(SERVICES) - {"nats"}:
        (command,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (DOCKER / f"{name}.Dockerfile").read_text(), re.MULTILINE)
        assert {f"--metrics.port={job['port']}", "--network.host=0.0.0.0"} <= set(json.loads(command)), name


MODEL = {"path": ROOT / "models" / "tiny-qwen3-vl"}


def test_the_recipe_for_gpus_is_sound(tmp_path: Path) -> None:
    """All its keys and values are valid; its model and data are the reader's to fetch."""
    data = tmp_path / "train.parquet"
    data.touch()
    overrides = [f"--model.path={MODEL['path']}", f"--data.path={data}"]
    recipe = configuration.load(Recipe, [ROOT / "recipes" / "rlinf-geo3k-grpo.toml"], overrides)
    assert recipe.algorithm.preset == "rlinf_geo3k"


def test_the_command_of_the_recipe_for_gpus_finds_what_was_fetched(tmp_path: Path) -> None:
    """Containers ask nobody: they read the cache of whoever starts them, as that user."""
    recipe = (ROOT / "recipes" / "rlinf-geo3k-grpo.toml").read_text().replace("\\\n#", "")
    [command] = re.findall(r"^# +(cd deploy && .* docker compose up)$", recipe, re.MULTILINE)
    shown = command.replace("docker compose up", "env")
    environment = {**ENVIRONMENT, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", shown], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    given = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert given["COMPOSE_FILE"].split(":") == [BASE.name, OVERRIDES[0].name]
    assert given["PENSTOCK_HF_HOME"] == str(tmp_path / ".cache" / "huggingface")
    assert [given["PENSTOCK_UID"], given["PENSTOCK_GID"]] == [str(os.getuid()), str(os.getgid())]


def test_engines_of_all_roles_run_alike() -> None:
    """The override with prefill and decode repeats what compose cannot extend; it must not fall behind."""
    unified = read(BASE)["services"]["rollout"]
    for role in ("prefill", "decode"):
        engine = read(OVERRIDES[1])["services"][role]
        assert f"--rollout.role={role}" in engine["command"]
        apart = {"image", "command", "scale"}
        assert engine["image"] == unified["image"].replace("rollout", role)
        assert {key: value for key, value in engine.items() if key not in apart} == {
            key: value for key, value in unified.items() if key not in apart
        }


@pytest.mark.parametrize("further", [[], [OBSERVABILITY]], ids=["", "with observability"])
def test_engines_of_all_roles_have_gpus_alike(further: list[Path]) -> None:
    """As compose merges the files: what `rollout` has on GPUs each role of a pair has too, and GPUs of its own."""
    services = merged([BASE, *OVERRIDES, *further], ENVIRONMENT)
    unified, trainer = services["rollout"], services["trainer"]
    on_gpus = {name: each["environment"] for name, each in services.items() if each.get("deploy")}
    gpus = {name: environment.pop("CUDA_VISIBLE_DEVICES") for name, environment in on_gpus.items()}
    assert gpus.keys() == {"rollout", "trainer", "prefill", "decode"}
    assert len({gpus[name] for name in ("trainer", "prefill", "decode")}) == 3
    assert unified["deploy"]["resources"] == trainer["deploy"]["resources"]
    assert "prometheus" in services or not further
    for role in ("prefill", "decode"):
        engine = services[role]
        assert engine["image"] == unified["image"].replace("rollout", role)
        assert words(engine) == [*words(unified), f"--rollout.role={role}"]
        assert mounts(engine) == {each.replace("rollout-cache", f"{role}-cache") for each in mounts(unified)}
        assert engine["deploy"]["resources"] == unified["deploy"]["resources"]
        apart = {"image", "command", "scale", "deploy", "volumes"}
        assert {key: value for key, value in engine.items() if key not in apart} == {
            key: value for key, value in unified.items() if key not in apart
        }


def test_ranks_of_the_trainer_have_a_gpu_each() -> None:
    """By deploy.md's example of them beside a pair: nobody shares a GPU, and the trainer starts as many as it sees."""
    text = (ROOT / "docs" / "operation" / "deploy.md").read_text().partition("On four GPUs, with two ranks:\n\n")[2]
    example = dict(line.strip().split("=", 1) for line in text.partition("\n\n")[0].splitlines())
    assert example["PENSTOCK_TRAINER_GPUS"] == "2,3"
    services = merged([BASE, *OVERRIDES], ENVIRONMENT | example)
    gpus = {name: services[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in ("prefill", "decode", "trainer")}
    assert gpus == {"prefill": "0", "decode": "1", "trainer": "2,3"}
    assert "--rollout.gpu_memory_fraction=0.85" in words(services["decode"])
    option, recipe, *overrides = words(services["trainer"])
    assert option == "--config"
    assert configuration.load(Recipe, [ROOT / recipe], overrides).trainer.ranks == len(gpus["trainer"].split(","))


def merged(files: list[Path], environment: dict[str, str]) -> dict[str, Any]:
    """The services of these files, as compose merges them in an environment."""
    arguments = [part for path in files for part in ("--file", str(path))]
    command = [*installed_compose(), *arguments, "config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


def words(service: dict[str, Any]) -> list[str]:
    """Of a service's command, which one compose prints as a text and another as a list."""
    command = service["command"]
    return command.split() if isinstance(command, str) else command


def mounts(service: dict[str, Any]) -> set[str]:
    """The volumes of a service, which one compose prints as texts and another as mappings."""
    return {json.dumps(each, sort_keys=True) for each in service["volumes"]}
