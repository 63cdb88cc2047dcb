"""The chart's pods, started by podman from the rendered manifests: `make test-helm-pods`.

Not collected by `make test`: its images take 13 GB, and 12 GB more while they are built. It prints what it measures.
"""

import json
import os
import sys
import time
from collections.abc import Set
from typing import Any

import pytest

from tests.helm.pods import Podman, Release, leftovers, missing, release

pytestmark = pytest.mark.timeout(5400)

NUM_STEPS = int(os.environ.get("NUM_STEPS", "500"))
GROUPS_PER_STEP = 8
RUN = "chart-test"
VALUES = {
    "run": RUN,
    "settings": [
        f"trainer.num_steps={NUM_STEPS}",
        f"trainer.groups_per_step={GROUPS_PER_STEP}",
        "trainer.samples_per_group=4",
        "trainer.checkpoint_every=5",
        "worker.concurrency=16",
        "rollout.max_running=32",
    ],
}


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    """With all images in its storage."""
    assert missing() == "", missing()
    started = time.monotonic()
    found = Podman.in_folder(tmp_path_factory.mktemp("podman"))
    found.build_images()
    tell(f"images built in {time.monotonic() - started:.0f} s")
    return found


def test_the_rendered_pods_train_through_kills_and_scaling(podman: Podman) -> None:
    """One engine, then two, one of them killed, then one; pods are gone at once and come again; the trainer is stopped
    and goes on: no group is lost or trained twice."""
    with release(podman, VALUES) as pods:
        started = time.monotonic()
        for workload in ("nats", "reward", "router"):
            pods.play(workload)
        for workload in ("nats", "reward", "router"):
            pods.wait_until(lambda workload=workload: pods.is_ready(workload), f"a ready {workload}", 120)  # type: ignore[misc]
        pods.play("rollout-unified", pod="rollout-unified-0")
        pods.play("worker")
        pods.play("trainer")
        pods.wait_until(lambda: bool(pods.rows(RUN)), "the first trained step", 600)
        tell(f"from the first pod to the first trained step: {time.monotonic() - started:.0f} s")
        for workload in ("rollout-unified-0", "worker", "trainer"):
            pods.wait_until(lambda workload=workload: pods.is_ready(workload), f"a ready {workload}", 60)  # type: ignore[misc]
        assert_confined(pods)

        pods.play("rollout-unified", pod="rollout-unified-1")
        took_s = pods.wait_until(lambda: len(engines_with_calls(pods)) == 2, "two engines that take calls", 300)
        tell(f"scaled up: two engines take calls after {took_s:.0f} s, at step {last_step(pods)}")

        killed, before = engines_of(pods, "rollout-unified-0"), restarts(pods, "rollout-unified-0")
        assert len(killed) == 1, killed
        pods.crash("rollout-unified-0")
        pods.wait_until(lambda: restarts(pods, "rollout-unified-0") > before, "a restart of the engine", 60)
        took_s = pods.wait_until(lambda: pods.is_ready("rollout-unified-0"), "a ready engine", 300)
        tell(f"killed engine: ready again after {took_s:.0f} s, at step {last_step(pods)}")
        wait_for_successor(pods, "rollout-unified-0", killed)

        lose_pods(pods)

        assert pods.end("rollout-unified-1") == 0
        tell(f"scaled down at step {last_step(pods)}")

        goal = last_step(pods) + 2
        pods.wait_until(lambda: last_step(pods) >= goal, f"step {goal}", 600)
        assert last_step(pods) < NUM_STEPS, "the run was over before all was tried; raise NUM_STEPS"
        code = pods.end("trainer")
        tell(f"trainer stopped at step {last_step(pods)} with exit code {code}")
        assert code == 143, "its Job would take the run for complete"
        pods.play("trainer")
        pods.wait_until(lambda: not pods.inspect("trainer")["State"]["Running"], "the end of the run", 1800)
        assert pods.inspect("trainer")["State"]["ExitCode"] == 0, pods.logs()
        tell(f"the run ended {time.monotonic() - started:.0f} s after the first pod")
        rows = pods.rows(RUN)
        name = pods.name
    assert leftovers(podman, name) == []
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)), "a step is missing or there twice"
    trained = [index for row in rows for index in row["groups"]]
    lost = set(range(NUM_STEPS * GROUPS_PER_STEP)) - {*trained}
    tell(f"groups trained {len(trained)}, lost {len(lost)}, trained twice {len(trained) - len({*trained})}")
    assert sorted(trained) == list(range(NUM_STEPS * GROUPS_PER_STEP)), "a group was lost or trained twice"


def test_a_setting_that_is_wrong_ends_the_trainer_with_2(podman: Podman) -> None:
    """The code that fails its Job at once."""
    with release(podman, {**VALUES, "settings": ["trainer.device=cuda"]}) as pods:
        pods.play("nats")
        pods.wait_until(lambda: pods.is_ready("nats"), "a ready nats", 120)
        pods.play("trainer")
        pods.wait_until(lambda: not pods.inspect("trainer")["State"]["Running"], "the end of the trainer", 300)
        assert pods.inspect("trainer")["State"]["ExitCode"] == 2, pods.logs()
        name = pods.name
    assert leftovers(podman, name) == []


def lose_pods(pods: Release) -> None:
    """The pods of an engine, the router and the trainer are removed without SIGTERM, and others take their places."""
    lost = engines_of(pods, "rollout-unified-1")
    assert len(lost) == 1, lost
    pods.lose("rollout-unified-1")
    took_s = pods.wait_until(lambda: misses(pods, lost), "a router that lists the other engine only", 120)
    tell(f"lost pod of an engine: the router misses it after {took_s:.0f} s, at step {last_step(pods)}")
    pods.play("rollout-unified", pod="rollout-unified-1")
    took_s = wait_for_successor(pods, "rollout-unified-1", lost)
    tell(f"its successor takes calls after {took_s:.0f} s, at step {last_step(pods)}")

    pods.lose("router")
    pods.play("router")
    took_s = pods.wait_until(lambda: len(replicas(pods)) == 2, "a router that lists both engines", 120)
    tell(f"lost pod of the router: its successor lists both engines after {took_s:.0f} s, at step {last_step(pods)}")
    wait_for_steps(pods, "router")

    pods.lose("trainer")
    pods.play("trainer")
    wait_for_steps(pods, "trainer")
    pods.wait_until(lambda: len(engines_with_calls(pods)) == 2, "two engines that take calls", 120)


def wait_for_steps(pods: Release, successor: str) -> None:
    """Until steps have ended that the new pod of a workload had a part in."""
    before = last_step(pods)
    goal = before + 3  # with a max_staleness of 1, the groups of two steps may have been played before
    took_s = pods.wait_until(lambda: last_step(pods) >= goal, f"step {goal}", 600)
    tell(f"new pod of the {successor}: from step {before} to step {goal} in {took_s:.0f} s")


def wait_for_successor(pods: Release, pod: str, lost: Set[str]) -> float:
    """Until the pod's new engine takes calls and the router lists no lost one; returns how many seconds it took."""
    return pods.wait_until(
        lambda: misses(pods, lost) and bool(engines_of(pods, pod) & engines_with_calls(pods)),
        f"a new engine of {pod} that takes calls",
        300,
    )


def assert_confined(pods: Release) -> None:
    """As the manifests say: not root, nothing to write on; who comes without the token is refused."""
    for pod in ("nats", "reward", "router", "rollout-unified-0", "worker", "trainer"):
        done = pods.execute(pod, "sh", "-c", "id -u; touch /written && echo writable || echo read-only")
        assert done.stdout.split() == ["10001", "read-only"], pod
    asked = 'import urllib.request as u; u.urlopen("http://127.0.0.1:9400/metrics")'
    assert "401" in pods.execute("reward", "python3", "-c", asked, check=False).stderr


def replicas(pods: Release) -> list[dict[str, Any]]:
    """What the router lists, lost engines included until their leases end; empty while it does not answer."""
    done = pods.execute("router", "penstock", "replicas", "--address", "127.0.0.1:7001", "--json", check=False)
    if done.returncode != 0:
        return []
    found: list[dict[str, Any]] = json.loads(done.stdout)["replicas"]
    return found


def engines_of(pods: Release, pod: str) -> set[str]:
    """Ids of the listed engines at the pod's address: a pod's name stays, and every start has an id of its own."""
    return {each["replica_id"] for each in replicas(pods) if each["address"].split(":")[0] == pods.full(pod)}


def engines_with_calls(pods: Release) -> set[str]:
    """Ids of the engines that the router gives calls to; those at their limit, which it calls unroutable, have some."""
    return {each["replica_id"] for each in replicas(pods) if each["routable"] or each["num_in_flight"]}


def misses(pods: Release, lost: Set[str]) -> bool:
    """Whether the router lists engines, and none of the lost ones."""
    listed = {each["replica_id"] for each in replicas(pods)}
    return bool(listed) and not listed & lost


def restarts(pods: Release, pod: str) -> int:
    """How often podman has started its container again."""
    return int(pods.inspect(pod)["RestartCount"])


def last_step(pods: Release) -> int:
    """The last step that is in the metrics."""
    rows = pods.rows(RUN)
    return rows[-1]["step"] if rows else 0


def tell(line: str) -> None:
    """Write a measurement; `make test-helm-pods` lets it through."""
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()
