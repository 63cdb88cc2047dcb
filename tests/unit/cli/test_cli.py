"""The command line answers every mistake with one line and exit code 2."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from penstock.clients import RewardClient
from penstock.runtime.ports import free_ports
from services.cli import main
from tests.support.waiting import HANG_S

PENSTOCK = Path(sys.executable).parent / "penstock"


def penstock(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would, but in this process: what it imports is here already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def assert_mistake(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that holds `words`, nothing on stdout, exit code 2."""
    assert result.returncode == 2, result
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that is valid, for a model that is no more than its configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    path = tmp_path / "recipe.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/runs"\n[model]\npath = "{tmp_path}/model"\n[trainer]\nnum_steps = 7\n')
    return path


def test_version_is_the_package_s() -> None:
    """`penstock version` prints a version number, and the command's exit code is what is returned here elsewhere."""
    result = subprocess.run([PENSTOCK, "version"], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0
    assert result.stdout.strip()[0].isdigit()
    assert_mistake(subprocess.run([PENSTOCK, "fly"], capture_output=True, text=True, timeout=200, check=False), "fly")


def test_config_prints_a_recipe_that_means_the_same(recipe: Path, tmp_path: Path) -> None:
    """What `penstock config` prints is a whole recipe: printing that again changes nothing."""
    overrides = ("--algorithm.preset=ppo", "--algorithm.trust_region.clip_high=0.28", "--run.name=other")
    first = penstock("config", recipe, *overrides)
    assert first.returncode == 0, first.stderr
    resolved = tomllib.loads(first.stdout)
    assert resolved["trainer"]["num_steps"] == 7
    assert resolved["algorithm"]["trust_region"]["clip_high"] == 0.28
    assert resolved["run"]["name"] == "other"
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    assert penstock("config", again).stdout == first.stdout


@pytest.mark.parametrize("locale", [{"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"}])
def test_config_prints_utf8_in_every_locale(recipe: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    """`penstock config > file` writes a recipe, and recipes are read as UTF-8."""
    recipe.write_text(recipe.read_text().replace("/runs", "/Läufe"), encoding="utf-8")
    program = "import sys; from services.cli import main; sys.exit(main(['config', sys.argv[1]]))"
    environment = {**os.environ, "LC_ALL": "C", **locale}
    command = [sys.executable, "-c", program, recipe]
    result = subprocess.run(command, capture_output=True, timeout=200, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert tomllib.loads(result.stdout.decode())["run"]["dir"] == f"{tmp_path}/Läufe"


def test_overrides_may_stand_before_the_recipe(recipe: Path) -> None:
    """The order of recipe and overrides does not matter; of two overrides of a key the last counts."""
    result = penstock("config", "--run.name=first", recipe, "--run.name=second")
    assert tomllib.loads(result.stdout)["run"]["name"] == "second"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--model.path=/nowhere/at/all", ("model.path", "/nowhere/at/all", "config.json")),
        ("--data.path=/nowhere.parquet", ("/nowhere.parquet",)),
        ("--trainer.num_stepz=3", ("unknown key trainer.num_stepz", "num_steps")),
        ("--trainers.num_steps=3", ("unknown key trainers", "trainer")),
        ("--trainer.num_steps=many", ("trainer.num_steps", "many")),
        ("--trainer.num_steps=0", ("trainer.num_steps", "0")),
        ("--num_steps=3", ("--num_steps=3", "--section.key=value")),
        ("--trainer.num_steps", ("--trainer.num_steps", "--section.key=value")),
        ("--run.name=a b", ("run.name", "a b")),
        ("-x", ("-x", "--section.key=value")),
    ],
)
def test_bad_setting(recipe: Path, override: str, words: tuple[str, ...]) -> None:
    """A setting that is wrong is named with its value, and nothing is started."""
    assert_mistake(penstock("train", recipe, override), *words)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "RECIPE", "--trainer.num_steps", "20"),
        ("train", "--trainer.num_steps", "20", "RECIPE"),
        ("config", "RECIPE", "--trainer.num_steps", "20"),
        ("train", "--resume", "runs/some", "--trainer.num_steps", "20"),
        ("replay", "runs/some", "--trainer.num_steps", "20"),
        ("score", "lines.jsonl", "--trainer.num_steps", "20"),
        ("serve", "trainer", "--config", "RECIPE", "--trainer.num_steps", "20"),
    ],
    ids=" ".join,
)
def test_a_space_in_place_of_the_equals_sign(recipe: Path, arguments: tuple[str, ...]) -> None:
    """The setting is named, not its value, which looks like one more recipe."""
    given = [str(recipe) if argument == "RECIPE" else argument for argument in arguments]
    assert_mistake(penstock(*given), "'--trainer.num_steps' has no value", "write --section.key=value")


def test_a_flag_that_there_is_not(recipe: Path) -> None:
    """It is named also where something stands behind it; flags that there are stand anywhere."""
    assert_mistake(penstock("train", recipe, "--dryrun", "mine"), "'--dryrun' is not an override")
    assert penstock("train", "--dry-run", recipe, "--trainer.num_steps=3").returncode == 0


@pytest.mark.parametrize("command", [("config",), ("serve", "reward", "--config"), ("serve", "trainer", "--config")])
def test_every_command_checks_the_whole_recipe(recipe: Path, command: tuple[str, ...]) -> None:
    """A mistyped key fails alike in every process, whichever section it is in."""
    assert_mistake(penstock(*command, recipe, "--router.prot=1"), "unknown key router.prot", "port")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("penstock --help",)),
        (("fly",), ("fly",)),
        (("train",), ("recipe",)),
        (("train", "nowhere.toml"), ("nowhere.toml", "cannot be read")),
        (("train", "one.toml", "two.toml"), ("one.toml", "cannot be read")),
        (("train", "--resume"), ("--resume",)),
        (("train", "--resume", "/nowhere"), ("/nowhere", "config.toml")),
        (("serve",), ("service",)),
        (("serve", "kettle", "--config", "x.toml"), ("kettle",)),
        (("serve", "rollout"), ("section [model] is missing", "--config", "--model.path=")),
        (("serve", "worker", "--worker.num=1"), ("section [model] is missing",)),
        (("serve", "environments"), ("there is no environment to serve", "--worker.environments.NAME=")),
        (("serve", "router"), ("bus.url is empty", "--bus.url=")),
        (("serve", "reward", "--reward.port=99999"), ("reward.port", "99999")),
        (("serve", "nats", "--bus.url=nats://127.0.0.1"), ("bus.url", "nats://host:port")),
    ],
)
def test_bad_command(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """A command that is incomplete or unknown says what is missing."""
    assert_mistake(penstock(*arguments), *words)


def test_the_reward_service_needs_no_recipe() -> None:
    """`penstock serve reward` alone runs on defaults and logs its address; a recipe without [model] will do, too."""
    process = subprocess.Popen(
        [PENSTOCK, "serve", "reward", "--reward.workers=1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = json.loads(next(line for line in process.stderr if "server.started" in line))
        address = line["address"]

        async def profiles() -> list[str]:
            async with RewardClient(address) as client:
                return [profile.name for profile in await client.list_profiles()]

        assert "geo3k" in asyncio.run(profiles())
    finally:
        process.terminate()
        assert process.wait(HANG_S) == 0
        process.stderr.close()


def test_router_and_nats_need_no_model(tmp_path: Path) -> None:
    """A recipe without [model] starts a nats-server at bus.url, which takes large messages, and a router on it."""
    port = free_ports(1)[0]
    recipe = tmp_path / "services.toml"
    recipe.write_text(f'[run]\ndir = "{tmp_path}"\n[bus]\nurl = "nats://127.0.0.1:{port}"\n')
    processes = []
    try:
        for service in ("nats", "router"):
            processes.append(
                subprocess.Popen([PENSTOCK, "serve", service, "--config", recipe], stderr=subprocess.PIPE, text=True)
            )
            stderr = processes[-1].stderr
            assert stderr is not None
            assert any("server.started" in line or "Server is ready" in line for line in stderr), service
        assert (tmp_path / "run/nats/store").is_dir()
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
            assert f'"max_payload":{32 * 2**20}' in connection.recv(4096).decode()
        again = penstock("serve", "nats", "--config", recipe)
        assert_mistake(again, "bus.url", f"127.0.0.1:{port}", "choose another")
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(HANG_S)
            process.stderr.close()


def test_recipes_lie_over_each_other(recipe: Path, tmp_path: Path) -> None:
    """From left to right, between overrides in any order; `serve` takes them as --config."""
    overlay = tmp_path / "overlay.toml"
    overlay.write_text('[trainer]\nmax_staleness = 3\n[run]\nname = "over"\n')
    resolved = tomllib.loads(penstock("config", recipe, "--run.seed=5", overlay).stdout)
    assert (resolved["trainer"]["num_steps"], resolved["trainer"]["max_staleness"]) == (7, 3)
    assert (resolved["run"]["name"], resolved["run"]["seed"]) == ("over", 5)
    bad = tmp_path / "bad.toml"
    bad.write_text("[router]\nport = 99999\n")
    assert_mistake(penstock("serve", "reward", "--config", recipe, "--config", bad), "router.port", "99999")


def test_settings_explain_themselves() -> None:
    """Type, range, default and meaning of one section and those inside it, or of all."""
    result = penstock("config", "--help-settings", "trainer.optimizer")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("[trainer.optimizer]")
    assert "learning_rate = 1e-06\n      number, > 0\n      Learning rate after warm-up." in result.stdout
    headings = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert headings
    assert all(heading.lstrip("[").startswith("trainer.optimizer") for heading in headings)
    everything = penstock("config", "--help-settings").stdout
    assert everything.index("[run]") < everything.index("[trainer.optimizer]") < everything.index("[log]")
    assert_mistake(penstock("config", "--help-settings", "trainer.optimiser"), "did you mean trainer.optimizer?")
    assert_mistake(penstock("config", "--help-settings", "zzz"), "unknown section zzz", "known: algorithm, bus, data")
    assert_mistake(penstock("config", "--help-settings", "--run.seed=1"), "leave out --run.seed=1")


def test_a_dry_run_shows_the_plan_and_touches_nothing(recipe: Path) -> None:
    """Processes, addresses, GPUs and files; no folder, no process."""
    before = sorted(recipe.parent.iterdir())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    command = [PENSTOCK, "train", recipe, "--dry-run", "--rollout.replicas=3", "--router.port=7001"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rollout-2", "127.0.0.1,", "any", "free", "port", "2"] in lines
    assert ["trainer", "127.0.0.1,", "any", "free", "port", "3"] in lines
    assert ["router", "127.0.0.1:7001", "-"] in lines
    assert f"run folder {recipe.parent}/runs/run-<start>" in result.stdout
    assert sorted(recipe.parent.iterdir()) == before
    refused = subprocess.run(
        [*command, "--rollout.replicas=4"], capture_output=True, text=True, check=False, env=environment
    )
    assert_mistake(refused, "need 5 GPUs, and 4 can be used", "lower the number of engines to 3")


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("penstock tr", {"train"}),
        (
            "penstock train --algorithm.trust_region.clip",
            {f"--algorithm.trust_region.clip_{end}=" for end in ("low", "high")},
        ),
        ("penstock train --dry", {"--dry-run"}),
        ("penstock serve ro", {"router", "rollout"}),
        ("penstock serve rollout --rollout.tensor", {"--rollout.tensor_parallel="}),
    ],
)
def test_shells_complete_commands_and_settings(words: str, completions: set[str]) -> None:
    """What `penstock --install-completion` has the shell ask."""
    environment = {
        **os.environ,
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = subprocess.run([PENSTOCK], capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert set(result.stdout.split()) == completions, result


@pytest.mark.parametrize("words", ["penstock train --", "penstock view --"])
def test_each_line_is_a_completion_in_fish(words: str) -> None:
    """Helps are not wrapped, however narrow the terminal is."""
    environment = {
        **os.environ,
        "COLUMNS": "40",
        "_PENSTOCK_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": words,
    }
    result = subprocess.run([PENSTOCK], capture_output=True, text=True, timeout=200, check=False, env=environment)
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("--")] == []
    assert max(map(len, lines)) > 100


def test_a_process_also_writes_its_error_for_the_launcher(recipe: Path, tmp_path: Path) -> None:
    """As JSON, so that nobody has to search a log for it."""
    error_file = tmp_path / "error.json"
    result = penstock("serve", "trainer", "--config", recipe, "--error-file", error_file, "--model.path=/nowhere")
    assert_mistake(result, "model.path = '/nowhere'")
    error = json.loads(error_file.read_text())
    assert error["error"] == "ConfigError"
    assert result.stderr == f"error: {error['message']}\n"


def test_recipe_that_is_no_toml(tmp_path: Path) -> None:
    """A syntax error is reported with its place."""
    path = tmp_path / "broken.toml"
    path.write_text("[run\n")
    assert_mistake(penstock("config", path), "broken.toml", "line 1")


def test_settings_are_checked_before_anything_heavy_is_imported(recipe: Path) -> None:
    """Parsing the recipe of a trainer imports neither torch nor transformers nor sglang."""
    script = (
        "import sys; from services.cli import main; "
        f"main(['serve', 'trainer', '--config', {str(recipe)!r}, '--no.such=1']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'sglang', 'grpc')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=200, check=False).returncode == 0


def test_missing_extra_names_the_remedy(recipe: Path) -> None:
    """A service whose packages are not installed says which extra brings them."""
    script = (
        "import sys; sys.modules['grpc'] = None; from services.cli import main; "
        f"sys.exit(main(['serve', 'reward', '--config', {str(recipe)!r}]))"
    )
    command = [sys.executable, "-c", script]
    assert_mistake(
        subprocess.run(command, capture_output=True, text=True, timeout=200, check=False), "grpc", "penstock[reward]"
    )


def test_run_folder_that_cannot_be_made(recipe: Path, tmp_path: Path) -> None:
    """A run.dir that is a file is refused by name."""
    (tmp_path / "file").write_text("")
    assert_mistake(penstock("train", recipe, f"--run.dir={tmp_path}/file"), "run.dir", f"{tmp_path}/file")


def test_help_shows_the_names_of_sections() -> None:
    """A name in brackets is no markup."""
    shown = " ".join(penstock("sft", "--help").stdout.split())
    assert "Takes [sft], [data], [model], [trainer] and [trackers]" in shown
