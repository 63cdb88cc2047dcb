"""What the launcher settles before it starts anything, and what it reads while the run goes on."""

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import SetupError
from penstock.runtime.children.reaper_process import groups_left
from penstock.runtime.security import Security
from penstock.v1 import trainer_pb2
from services.launch import launcher
from services.launch.launcher import addressed
from services.launch.metrics import (
    MetricsFollower,
    StepRow,
    describe_run,
    describe_step,
    describe_waits,
    sparkline,
)
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import StopPhase
from services.launch.process.specs import child_environment, process_specs
from services.launch.run_bus import bus_host, reach_of
from services.launch.run_folder import RunFolder
from services.launch.run_follower import RunFollower
from services.launch.run_plan import make_plan
from services.launch.run_status import describe_phase
from services.recipe import Recipe
from tests.support.waiting import HANG_S, until


def test_demo_recipe_holds_known_keys_only(tmp_path: Path) -> None:
    """recipes/tiny-cpu.toml is valid, but for its model, which the working directory decides."""
    (tmp_path / "config.json").write_text("{}")
    recipes = Path(__file__).parents[3] / "recipes"
    assert load(Recipe, [recipes / "tiny-cpu.toml"], [f"--model.path={tmp_path}"]).rollout.replicas == 2


def test_every_server_gets_an_address(recipe: Recipe) -> None:
    """Ports that are 0 become different free ones, given ones stay; engines choose their own and tell them by lease."""
    folder = RunFolder.create(recipe.run)
    given = recipe.model_copy(update={"router": recipe.router.model_copy(update={"port": 4321})})
    with addressed(given, folder) as live, addressed(live, folder) as again:
        assert live.router.port == 4321
        ports = {live.reward.port, live.trainer.port, int(live.bus.url.rpartition(":")[2])}
        assert len(ports) == 3
        assert 0 not in ports
        assert live.rollout.port == 0
        assert live.run.folder == folder.path
        assert again == live


def test_the_bus_listens_where_the_services_do(recipe: Recipe) -> None:
    """On this machine alone by default; under the advertised name where other hosts reach the services."""
    assert bus_host(recipe.network) == "127.0.0.1"
    opened = recipe.network.model_copy(update={"host": "0.0.0.0", "advertise_host": "127.0.0.2"})
    folder = RunFolder.create(recipe.run)
    with addressed(recipe, folder, host=bus_host(opened)) as live:
        assert live.bus.url.startswith("nats://127.0.0.2:")
        plan = make_plan(live, [], own_bus=True)
        nats = next(process for process in plan.processes if process.name == "nats")
        assert f"nats://{nats.address}" == live.bus.url
        (spec,) = [spec for spec in process_specs(plan, folder, Security()) if spec.name == "nats"]
        assert f'listen: "{nats.address}"' in (folder.nats / "nats.conf").read_text()
        assert spec.address == nats.address
    for elsewhere in ("192.0.2.200", "no-such-host.invalid"):
        with pytest.raises(SetupError, match=f"NATS cannot listen on {re.escape(elsewhere)}; give --network.adv"):
            bus_host(opened.model_copy(update={"advertise_host": elsewhere}))


def test_a_name_that_leads_to_loopback_is_told() -> None:
    """As Debian's /etc/hosts has it, nobody else could reach it; addresses and localhost are given on purpose."""
    [line] = reach_of("node1", resolve={"node1": "127.0.1.1"}.__getitem__)
    assert "node1 leads to 127.0.1.1" in line
    assert "/etc/hosts, or give --network.advertise_host=" in line
    for host in ("localhost", "127.0.0.1", "no-such-host.invalid"):
        assert reach_of(host) == []
    assert reach_of("node1", resolve={"node1": "10.0.0.5"}.__getitem__) == []


def test_addresses_are_kept_until_the_run_ends(recipe: Recipe) -> None:
    """No other program finds a server's port free before the server has started, or while it is down."""
    with (
        addressed(recipe, RunFolder.create(recipe.run)) as live,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", live.router.port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", live.router.port))


def test_ports_that_the_recipe_gives_are_kept_too(recipe: Recipe) -> None:
    """From before their servers listen; one on which somebody listens already is named before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        given = recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"http_port": port})})
        taken = pytest.raises(SetupError, match=rf"reward\.http_port: cannot listen on 127\.0\.0\.1:{port}: .* in use")
        with taken, addressed(given, RunFolder.create(recipe.run)):
            pass
    with (
        addressed(given, RunFolder.create(recipe.run)),
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", port))


def test_processes_of_a_run(recipe: Recipe) -> None:
    """Replicas have names of their own; only the trainer ends the run; what serves is stopped after what works."""
    with addressed(recipe, RunFolder.create(recipe.run)) as live:
        pass
    processes = {process.name: process for process in make_plan(live, [], own_bus=True).processes}
    assert list(processes) == ["nats", "rollout-0", "rollout-1", "trainer", "reward", "router", "worker-0"]
    assert [name for name, process in processes.items() if process.ends_run] == ["trainer"]
    phases = {name: process.phase for name, process in processes.items()}
    assert phases["worker-0"] == phases["trainer"] == StopPhase.WORK < phases["router"] == phases["rollout-1"]
    assert max(phases, key=lambda name: phases[name]) == "nats"
    assert "nats" not in {process.name for process in make_plan(live, [], own_bus=False).processes}


def test_a_plan_says_what_runs_where(recipe: Recipe) -> None:
    """Before addresses are chosen and after; with GPUs, which process has which."""
    assert make_plan(recipe, ["0", "1", "2", "3"], own_bus=True).describe() == [
        "process    address                   GPUs",
        "nats       127.0.0.1, any free port  -",
        "rollout-0  127.0.0.1, any free port  0",
        "rollout-1  127.0.0.1, any free port  1",
        "trainer    127.0.0.1, any free port  2",
        "reward     127.0.0.1, any free port  -",
        "router     127.0.0.1, any free port  -",
        "worker-0   127.0.0.1, any free port  -",
        "3 of 4 GPUs are used, each by one process",
    ]
    with addressed(recipe, RunFolder.create(recipe.run)) as live:
        pass
    lines = make_plan(live, [], own_bus=True).describe()
    assert ["router", f"127.0.0.1:{live.router.port}", "-"] in [line.split() for line in lines]
    assert lines[-1] == "no GPU: everything is computed on the CPU"


def test_processes_see_their_own_gpus(recipe: Recipe) -> None:
    """CUDA_VISIBLE_DEVICES of each process is its part of the plan, in an environment without CPU settings."""
    folder = RunFolder.create(recipe.run)
    with addressed(recipe, folder) as live:
        pass
    plan = make_plan(live, [str(index) for index in range(8)], own_bus=False)
    visible = {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in process_specs(plan, folder, Security())}
    assert visible == {
        "rollout-0": "0", "rollout-1": "1", "trainer": "2", "reward": "", "router": "", "worker-0": "",
    }  # fmt: skip


def test_a_log_is_kept_within_its_bound(tmp_path: Path) -> None:
    """What outgrew it moves to one predecessor; a process that has the file open for appending writes on."""
    path = tmp_path / "router.log"
    log = BoundedLog(path, max_bytes=1000)
    with path.open("ab", buffering=0) as writer:
        writer.write(b"old " * 10 + b"\n")
        log.mark_start()
        log.bound()
        assert not (tmp_path / "router.log.1").exists()
        for number in range(100):
            writer.write(f"line {number} {'x' * 90}\n".encode())
            log.bound()
            assert path.stat().st_size <= 1100
        writer.write(b"the last words\n")
    assert (tmp_path / "router.log.1").stat().st_size <= 1100
    assert log.last_lines(1) == ["the last words"]
    assert len(log.last_lines(1000)) < 12
    assert {each.name for each in tmp_path.iterdir()} == {"router.log", "router.log.1"}


def test_a_log_is_kept_within_its_bound_where_it_cannot_be_copied(tmp_path: Path) -> None:
    """On a full disk the log is cut all the same."""
    path = tmp_path / "router.log"
    path.write_text("x" * 2000)
    (tmp_path / "router.log.1").symlink_to("/dev/full")
    BoundedLog(path, max_bytes=1000).bound()
    assert path.stat().st_size == 0
    assert not (tmp_path / "router.log.1").is_symlink()


def test_a_log_s_end_is_that_of_the_newest_start(tmp_path: Path) -> None:
    """What an earlier start of the process has logged is no explanation of its last death."""
    path = tmp_path / "router.log"
    path.write_text("an earlier life\n")
    log = BoundedLog(path)
    assert log.last_lines(5) == ["an earlier life"]
    log.mark_start()
    assert log.last_lines(5) == []
    with path.open("a") as writer:
        writer.write("1\n2\n3\n")
    assert log.last_lines(2) == ["2", "3"]
    assert BoundedLog(tmp_path / "none.log").last_lines(5) == []
    assert BoundedLog(tmp_path).last_lines(5) == []  # it cannot be read: as without a descriptor or a network


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (trainer_pb2.RUN_PHASE_STARTING, "loading the model"),
        (trainer_pb2.RUN_PHASE_TRAINING, "computing step 8 of 20"),
        (trainer_pb2.RUN_PHASE_PUSHING, "pushing weights to the engines"),
        (trainer_pb2.RUN_PHASE_SAVING, "writing the checkpoint of step 7"),
        (trainer_pb2.RUN_PHASE_EVALUATING, "ending the evaluation of step 7"),
        (trainer_pb2.RUN_PHASE_COLLECTING, "ending the step"),
    ],
)
def test_what_the_trainer_is_still_doing(phase: trainer_pb2.RunPhase.ValueType, words: str) -> None:
    """As a person reads it who has pressed Ctrl-C."""
    assert describe_phase(trainer_pb2.GetRunResponse(phase=phase, step=7, num_steps=20)) == words


def test_one_computing_thread_each_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each process computes in one thread, unless the person has decided otherwise."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert child_environment(has_gpu=False)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in child_environment(has_gpu=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert child_environment(has_gpu=False)["OMP_NUM_THREADS"] == "3"


def test_reaper_kills_groups_that_were_not_taken_back() -> None:
    """The reaper's list is what was named and not taken back."""
    assert groups_left(["+11\n", "+12\n", "-11\n", "+13\n"]) == {12, 13}


def write_rows(path: Path, rows: list[dict[str, Any]], mode: str = "a") -> None:
    """Append rows as the trainer does."""
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_follower_reads_whole_lines_once(tmp_path: Path) -> None:
    """A row is given when its line is complete, and only once."""
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.poll() == []
    write_rows(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step"')
    assert follower.poll() == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write(": 3}\n")
    assert follower.poll() == [{"step": 3}]
    assert [row["step"] for row in follower.rows] == [1, 2, 3]


def test_follower_takes_over_a_replaced_file(tmp_path: Path) -> None:
    """When a resumed trainer cuts the file back, its steps count, and those known already are not shown again."""
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    write_rows(path, [{"step": 1}, {"step": 2, "reward_mean": 0.1}])
    follower.poll()
    write_rows(tmp_path / "new", [{"step": 1}, {"step": 2, "reward_mean": 0.2}, {"step": 3}])
    os.replace(tmp_path / "new", path)
    assert follower.poll() == [{"step": 3}]
    assert follower.rows[1]["reward_mean"] == 0.2


class SlowFollower(RunFollower):
    """Its reading goes on when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, MetricsFollower(folder / "metrics.jsonl"), MetricsFollower(folder / "evaluations.jsonl")
        )
        self.began, self.goes_on = threading.Event(), threading.Event()

    def poll(self, write: Callable[[str], None]) -> list[StepRow]:
        assert threading.current_thread() is not threading.main_thread()
        self.began.set()
        self.goes_on.wait(HANG_S)
        return super().poll(write)


async def test_a_long_file_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    """Which watches the processes meanwhile. What was read when the run ends is shown all the same."""
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1}])
    write_rows(tmp_path / "evaluations.jsonl", [{"step": 1, "elapsed_s": 2.5, "sets": {}}])
    shown, lines = list[StepRow](), list[str]()
    supervisor: Any = SimpleNamespace(children=())
    display: Any = SimpleNamespace(show=lambda _children, _rows, new_rows, _found: shown.extend(new_rows))
    display.write = lines.append
    follower = SlowFollower(tmp_path)
    async with launcher._watched(supervisor, follower, display, BoundedLog(tmp_path / "launcher.log")):
        await until(follower.began.is_set)
        asyncio.get_running_loop().call_soon(follower.goes_on.set)  # when the context has been left
    assert (shown, lines) == ([{"step": 1}], ["evaluation of step 1  2.5 s"])


def test_sparkline_rises_with_the_values() -> None:
    """The least value is the lowest bar, the greatest the highest; long series are averaged into the width."""
    assert sparkline([0.0, 0.5, 1.0], width=10) == "▁▅█"
    assert sparkline([float(number) for number in range(800)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], width=8) == "▁▁"
    assert sparkline([float("nan")], width=8) == ""


def test_step_is_one_line() -> None:
    """A step's line holds what a person watches; what the row lacks is left out."""
    row = {"step": 3, "num_steps": 100, "reward_mean": 0.4128, "staleness_mean": 0.5, "staleness_max": 1}
    row |= {"output_tokens_per_s": 1234.5, "push_s": 0.21, "num_replicas": 2, "dlogp_mean": 1.2e-6, "dlogp_max": 9e-6}
    row |= {"trainer_idle_fraction": 0.126}
    assert describe_step(row) == (
        "step 3/100  reward 0.413  staleness 0.50 (max 1)  1,234 tokens/s  push 0.21 s  replicas 2  idle 13%  "
        "|dlogp| 1.2e-06 (max 9.0e-06)"
    )
    assert describe_step({"step": 3, "num_steps": 4}) == "step 3/4"


def test_the_display_says_what_the_trainer_waited_for() -> None:
    """Only what took time; rows of another version may lack some of it."""
    row = {"train_s": 1.24, "wait_s": 0.31, "push_wait_s": 0.06, "data_wait_s": 0.0, "checkpoint_wait_s": 0.001}
    assert describe_waits(row) == "1.2 s training, waiting 0.3 s for groups, 0.1 s for pushes"
    assert describe_waits({"train_s": 1.0}) == "1.0 s training"


def test_filtered_groups_are_shown_with_the_reward_of_all_that_were_played() -> None:
    """A batch without groups of equal rewards stays near one half, whatever the policy learns."""
    row = {"step": 3, "num_steps": 4, "reward_mean": 0.5, "reward_mean_played": 0.9}
    assert describe_step(row) == "step 3/4  reward 0.500"
    row |= {"num_filtered_groups": 7, "filtered_group_fraction": 0.25}
    assert describe_step(row) == "step 3/4  reward 0.900  filtered 25%"
    assert describe_run([row]) == [
        "reward  first 1 steps 0.900, last 1 steps 0.900 (+0.000)",
        "groups  filtered 7",
    ]


def test_summary_compares_the_first_steps_with_the_last() -> None:
    """The summary gives the mean reward of the first and last ten steps, and what became of the groups."""
    rows = [
        {"step": n, "reward_mean": 0.2 if n <= 10 else 0.7, "num_groups": 2, "groups": [2 * n, 2 * n + 1]}
        for n in range(1, 31)
    ]
    rows[-1] |= {"num_trained_groups": 60, "num_stale_groups": 1, "num_failed_groups": 0, "groups": [60, 17]}
    assert describe_run(rows) == [
        "reward  first 10 steps 0.200, last 10 steps 0.700 (+0.500)",
        "groups  trained 60, stale 1, failed 0, trained twice 1",
    ]
    assert describe_run([]) == ["no step was trained"]
