"""kill -9 of processes in the middle of a run, and one that is frozen: no group is lost, none is trained twice, none is
stale.

`make chaos` kills and freezes all of them, engines of every role and nats-server too.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.train_process import RECIPE, started
from services.rollout.testing.engine_process import log_events
from tests.support.engine.agreement import require_agreement

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

GROUPS_PER_STEP = 8


def overrides(tmp_path: Path, **settings: object) -> list[str]:
    """A small, quick run; keys with '__' for '.'."""
    base: dict[str, object] = {
        "run.dir": tmp_path / "runs",
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.samples_per_group": 4,
        "trainer.checkpoint_every": 5,
    }
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return [f"--{key}={value}" for key, value in (base | given).items()]


def test_killing_each_process_loses_nothing(tmp_path: Path) -> None:
    """The decode engine of the only pair, the worker, the router, the trainer, its second rank and the reward service
    die in turn. Then Ctrl-C ends all, the newest checkpoint is damaged, and `--resume` goes on to the end.

    A pair plays first, and an engine of both roles after the resume. Weights are broadcast, the one way in which the
    members of a push wait for each other. The run evaluates itself, and the trainer dies inside an evaluation. It
    starts its rank itself, so both come up again whichever of them dies.
    """
    num_steps = 10
    evaluation = {"every": 5, "at_end": "true", "sets__geometry__num_prompts": 24, "sets__held_out__num_prompts": 8}
    settings = overrides(
        tmp_path,
        rollout__replicas=0,
        rollout__prefill=1,
        rollout__decode=1,
        trainer__num_steps=num_steps,
        trainer__ranks=2,
        trainer__weight_sync__transport="broadcast",
        **{f"evaluation__{key}": value for key, value in evaluation.items()},
    )
    victims = {1: "decode", 2: "worker", 3: "router", 5: "trainer", 6: "rank", 7: "reward"}
    with started(tmp_path, str(RECIPE), *settings) as train:
        for step, victim in victims.items():
            train.wait_for_step(step, timeout_s=240)
            if victim == "trainer":
                begun = train.folder / f"evaluations/step-{step:06d}/samples.jsonl"
                train.wait_until(lambda begun=begun: begun.exists() and begun.read_bytes(), "an evaluation", 120)
            train.kill(victim)
        train.wait_for_step(8, timeout_s=240)
        os.kill(train.process.pid, signal.SIGINT)
        assert train.wait(240) == 130
        assert f"penstock train --resume {train.folder}" in train.output.read_text()
        assert train.left_behind() == []
        folder = train.folder
    damage_newest_checkpoint(folder)
    alone = ("--rollout.replicas=1", "--rollout.prefill=0", "--rollout.decode=0")
    with started(tmp_path, "--resume", str(folder), *alone) as train:
        assert train.wait(500) == 0, train.tail()
        assert_nothing_was_lost(train.rows(), num_steps)
        assert train.folder == folder
        assert_evaluated(train.folder, [5, num_steps], num_prompts={"geometry": 24, "held_out": 8})
        assert train.left_behind() == []


def test_a_frozen_rank_loses_nothing(tmp_path: Path) -> None:
    """The trainer's second rank is stopped and never continued: the trainer ends with it after a time without a sign of
    life, starts again with both, and goes on from its checkpoint."""
    num_steps = 6
    settings = overrides(
        tmp_path, rollout__replicas=1, trainer__num_steps=num_steps, trainer__ranks=2, trainer__checkpoint_every=2
    )
    with started(tmp_path, str(RECIPE), *settings) as train:
        train.wait_for_step(3, timeout_s=240)
        train.freeze("rank")
        assert train.wait(500) == 0, train.tail()
        log = train.folder / "logs" / "trainer.log"
        assert "rank 1 gave no sign of life for 20 s" in log.read_text()
        first, second = [event for event in log_events(log) if event["event"] == "run.opened"]
        assert (first["resumed"], second["resumed"]) == (False, True)
        assert second["step"] in (2, 4)
        assert_nothing_was_lost(train.rows(), num_steps)
        assert train.left_behind() == []


def damage_newest_checkpoint(folder: Path) -> None:
    """Change a bit of the weights that the last rank has written: the run goes on from the one before."""
    newest = max((folder / "checkpoints").glob("step-*"))
    weights = max((newest / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def assert_evaluated(folder: Path, steps: list[int], *, num_prompts: dict[str, int]) -> None:
    """Each evaluation once, whole, and every token of the one version that it names."""
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == steps
    for row in rows:
        played_of = {name: (each["num_prompts"], each["num_failed_prompts"]) for name, each in row["sets"].items()}
        assert played_of == {name: (number, 0) for name, number in num_prompts.items()}
        samples = (folder / f"evaluations/step-{row['step']:06d}/samples.jsonl").read_text().splitlines()
        played = [json.loads(line) for line in samples]
        assert sorted((line["set_name"], line["row"]) for line in played) == [
            (name, row) for name, number in sorted(num_prompts.items()) for row in range(number)
        ]
        assert {tuple(line["versions"]) for line in played} == {(row["policy_version"],) * 2}


def assert_nothing_was_lost(rows: list[dict[str, Any]], num_steps: int, groups_per_step: int = GROUPS_PER_STEP) -> None:
    """Each step once, each group once, none stale or failed, and no version for two sets of weights."""
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1)), "a step is missing or there twice"
    trained = [index for row in rows for index in row["groups"]]
    assert sorted(trained) == list(range(num_steps * groups_per_step)), "a group was lost or trained twice"
    assert all(0 <= row["staleness_max"] <= row["max_staleness"] for row in rows)
    assert rows[-1]["num_failed_groups"] == 0
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(set(versions)), "a policy version was used twice"
    require_agreement(rows)
