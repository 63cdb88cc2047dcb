"""`make test-two-nodes`: the commands of docs/tutorials/two-nodes.md on two network namespaces of this machine. Needs
root.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.testing.train_process import ROOT, TrainProcess
from tests.e2e.test_killed_processes import assert_nothing_was_lost
from tests.support.launch.hosts import missing, search_path
from tests.support.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

NUM_STEPS, GROUPS_PER_STEP = 30, 32
PAGE = (ROOT / "docs/tutorials/two-nodes.md").read_text()


def block(language: str) -> str:
    """The page's only block in this language."""
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def commands(node: str) -> list[str]:
    """What the page has a reader type on node a or b, behind the words that lead into its namespace."""
    [enter] = re.findall(rf"`(ip netns exec {node} .*?)`", PAGE)
    section = PAGE.partition(f"\n## Start node {node.upper()}\n")[2].partition("\n## ")[0]
    return [f"{enter} {command}" for command in re.findall(r"^    (penstock .*)$", section, re.MULTILINE)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], TrainProcess]]:
    """Make the page's overlay and namespaces, and yield a function that starts a command in a terminal of its own."""
    assert not missing(), missing()
    [remove] = re.findall(r"`(ip netns delete .*?)`", PAGE)
    mark, terminals = f"penstock-test-{uuid.uuid4().hex}", list[TrainProcess]()

    def start(command: str) -> TrainProcess:
        output = tmp_path / f"terminal-{len(terminals)}.txt"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                shlex.split(command), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
        terminals.append(TrainProcess(process, tmp_path / "train", mark, output))
        return terminals[-1]

    (tmp_path / "two-nodes.toml").write_text(block("toml"))
    with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as scratch:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{search_path()}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("TMPDIR", scratch)
        monkeypatch.setenv("PENSTOCK_TEST_MARK", mark)
        subprocess.run(["sh", "-ec", block("sh")], check=True)
        try:
            yield start
        finally:
            for terminal in terminals:
                for pid in terminal.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                terminal.process.wait(HANG_S)
            subprocess.run(["sh", "-ec", remove], check=True)


def test_node_b_joins_and_its_engine_is_killed(start: Callable[[str], TrainProcess]) -> None:
    """Both engines and both workers play groups until B's engine is killed with -9; each group is trained once."""
    nats_of_a, train_of_a = commands("a")
    engine_of_b, replicas, worker_of_b = commands("b")
    nats = start(nats_of_a)
    wait_until(lambda: "Server is ready" in nats.output.read_text())
    # NATS has its store in runs, and TrainProcess wants the run alone in a folder.
    run = start(train_of_a.replace("runs/two", "train/two"))
    engine = start(engine_of_b)
    start(worker_of_b)
    run.wait_for_step(1, 300)
    engine.wait_until(lambda: run.rows()[-1]["num_replicas"] == 2, "a step with node B's engine", 300)
    listed = start(replicas)
    assert listed.wait(HANG_S) == 0
    assert len(re.findall(r"^engine-\w+ +unified ", listed.output.read_text(), re.MULTILINE)) == 2
    [victim] = psutil.Process(engine.process.pid).children()
    victim.kill()
    assert run.wait(600) == 0, run.tail()
    assert_nothing_was_lost(run.rows(), NUM_STEPS, GROUPS_PER_STEP)
    assert run.rows()[-1]["num_replicas"] == 1
    played = [json.loads(line) for line in (run.folder / "episodes/index.jsonl").read_text().splitlines()]
    assert len({group["worker"] for group in played}) == 2
    assert len({engine for group in played for _, _, engines in group["spans"] for engine in engines}) == 2
