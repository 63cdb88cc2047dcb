"""The compose stack on a real Docker engine: `make test-compose`.

Not collected by `make test`: its images take 13 GB. It prints what it measures.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock.clients import RouterClient
from penstock.config import SecurityConfig
from penstock.errors import AccessError, UnavailableError
from penstock.runtime.security import Security
from services.cli.replicas.table import describe_pool, fetch_pool
from tests.compose.stack import (
    PAIRS_FILE,
    ROOT,
    SERVICES,
    Stack,
    crash,
    health,
    image_sizes,
    inspect,
    leftovers,
    missing,
    size_on_disk,
    stack,
)
from tests.support.certificates import make_certificates, security_of
from tests.support.engine.agreement import require_agreement

pytestmark = [
    pytest.mark.skipif(bool(reason := missing()), reason=f"no compose stack here: {reason}"),
    pytest.mark.timeout(3600),
]

RUN = "compose-test"
TOKEN = "4be1c5f0d2a94c7a8f36"
NUM_STEPS = int(os.environ.get("NUM_STEPS", "400"))
GROUPS_PER_STEP = 8
ARGUMENTS = " ".join(
    (
        f"--run.name={RUN}",
        f"--trainer.num_steps={NUM_STEPS}",
        f"--trainer.groups_per_step={GROUPS_PER_STEP}",
        "--trainer.samples_per_group=4",
        "--trainer.checkpoint_every=5",
        "--worker.concurrency=16",
        "--rollout.max_running=32",
    )
)


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """All images, built; a second time after a change of the code."""
    with stack() as project:
        for service in SERVICES:
            started = time.monotonic()
            project.compose("build", service, timeout_s=3000)
            tell(f"build {service}: {time.monotonic() - started:.0f} s")
    for name, size in image_sizes().items():
        tell(f"image penstock-{name}: {size / 1e6:,.0f} MB")
    tell(f"all images together, each layer once: {size_on_disk() / 1e6:,.0f} MB")


@pytest.fixture
def running() -> Iterator[Stack]:
    """The stack, as `up` starts it, with a shortened run."""
    with stack(PENSTOCK_ARGS=ARGUMENTS) as project:
        yield project
    assert leftovers(project.project) == []


def test_a_run_survives_scaling_and_kills(running: Stack) -> None:
    """One engine, then three, then one; an engine, the worker, then each service dies: no group is lost or twice."""
    started = time.monotonic()
    running.compose("up", "--detach")
    tell(f"up returned after {time.monotonic() - started:.0f} s")
    running.wait_until(lambda: bool(running.rows(RUN)), "the first trained step", 600)
    tell(f"from `up` to the first trained step: {time.monotonic() - started:.0f} s")

    scale(running, 3)
    took_s = running.wait_until(lambda: num_routable(running) == 3, "three engines that take calls", 300)
    tell(f"three engines take calls {took_s:.0f} s after scaling up, at step {last_step(running)}")
    wait_for_steps(running, 5)

    victim = running.containers("rollout")[1]
    tell(f"kill -9 of an engine at step {last_step(running)}")
    kill_and_see_it_back(running, victim)
    wait_for_steps(running, 3)
    (worker,) = running.containers("worker")
    tell(f"kill -9 of the worker at step {last_step(running)}")
    kill_and_see_it_back(running, worker)
    wait_for_steps(running, 3)
    seed = int(os.environ.get("SEED", time.time_ns()))
    tell(f"every service, SEED={seed}")
    chance = random.Random(seed)
    for service in chance.sample(SERVICES, len(SERVICES)):
        tell(f"kill -9 of a {service} at step {last_step(running)}")
        kill_and_see_it_back(running, chance.choice(running.containers(service)))
        wait_for_steps(running, 2)

    before = last_step(running)
    took_s = scale(running, 1)
    tell(f"scaled down to one engine in {took_s:.0f} s, steps {before} to {last_step(running)}")
    assert last_step(running) < NUM_STEPS, "the run was over before all was tried; raise NUM_STEPS"

    (trainer,) = running.containers("trainer")
    running.wait_until(lambda: health(trainer) == "exited", "the end of the run", 1800)
    tell(f"the run ended {time.monotonic() - started:.0f} s after `up`")
    assert inspect(trainer)["State"]["ExitCode"] == 0, running.logs("trainer")
    assert_each_group_once(running)
    for service in ("nats", "reward", "router", "rollout", "worker"):
        assert [health(each) for each in running.containers(service)] == ["healthy"], service
    started = time.monotonic()
    running.compose("stop")
    tell(f"stop took {time.monotonic() - started:.0f} s")
    for service in ("nats", "reward", "router", "rollout", "worker"):
        codes = [inspect(each)["State"]["ExitCode"] for each in running.containers(service)]
        assert codes == [0] or service == "nats", f"{service} did not stop by itself: {codes}"


def test_pairs_train_behind_a_token_and_tls(tmp_path: Path) -> None:
    """Prefill and decode engines in place of unified ones, all with mutual TLS as .env.example shows it. Who comes
    without a certificate, or without PENSTOCK_TOKEN, is refused."""
    certificates = make_certificates(tmp_path)
    for path in (tmp_path / "certs", *(tmp_path / "certs").iterdir()):
        path.chmod(0o755)
    tls = example_of_mutual_tls()
    num_steps = 4
    settings = [tls["PENSTOCK_ARGS"], f"--run.name={RUN}", f"--trainer.num_steps={num_steps}"]
    settings += ["--trainer.groups_per_step=8", "--trainer.samples_per_group=4", "--worker.concurrency=16"]
    tls |= {"PENSTOCK_ARGS": " ".join(settings), "PENSTOCK_CERTS": str(tmp_path / "certs")}
    with stack(PAIRS_FILE, PENSTOCK_TOKEN=TOKEN, PENSTOCK_DECODES="1", **tls) as project:
        started = time.monotonic()
        project.compose("up", "--build", "--detach", timeout_s=1200)
        assert project.containers("rollout") == []
        project.wait_until(lambda: bool(project.rows(RUN)), "the first trained step", 600)
        tell(f"prefill and decode, mutual TLS: from `up` to the first trained step: {time.monotonic() - started:.0f} s")
        assert_only_members_come_in(project, certificates)
        (trainer,) = project.containers("trainer")
        project.wait_until(lambda: health(trainer) == "exited", "the end of the run", 600)
        assert inspect(trainer)["State"]["ExitCode"] == 0, project.logs("trainer")
        rows = project.rows(RUN)
        assert sorted(index for row in rows for index in row["groups"]) == list(range(num_steps * 8))
    assert leftovers(project.project) == []


def test_the_multi_turn_recipe_trains_and_is_evaluated() -> None:
    """Episodes with a tool and pictures, two engines, held-out pictures before and after."""
    num_steps, groups_per_step = 4, 4
    settings = [
        f"--run.name={RUN}",
        f"--trainer.num_steps={num_steps}",
        f"--trainer.groups_per_step={groups_per_step}",
        "--trainer.optimizer.warmup_steps=0",
        "--evaluation.at_start=true",
        "--evaluation.at_end=true",
        "--evaluation.sets.held_out.num_prompts=16",
        "--evaluation.sets.held_out.samples_per_prompt=2",
    ]
    chosen = {"PENSTOCK_RECIPE": "recipes/tiny-multi-turn.toml", "PENSTOCK_ARGS": " ".join(settings)}
    with stack(PENSTOCK_ROLLOUTS="2", **chosen) as project:
        started = time.monotonic()
        project.compose("up", "--detach")
        (trainer,) = project.containers("trainer")
        project.wait_until(lambda: health(trainer) == "exited", "the end of the run", 900)
        tell(f"multi-turn, two engines: the run ended {time.monotonic() - started:.0f} s after `up`")
        assert inspect(trainer)["State"]["ExitCode"] == 0, project.logs("trainer")
        rows, evaluations = project.rows(RUN), project.rows(RUN, "evaluations.jsonl")
    assert leftovers(project.project) == []
    assert sorted(index for row in rows for index in row["groups"]) == list(range(num_steps * groups_per_step))
    assert max(row["turns_max"] for row in rows) > 1
    assert all(row["observation_tokens_mean"] > 0 for row in rows), "no picture came back from the tool"
    assert all(row["grad_norm"] > 0 and row["num_error_samples"] == 0 for row in rows)
    require_agreement(rows)
    assert [row["step"] for row in evaluations] == [0, num_steps]
    for row in evaluations:
        held_out = row["sets"]["held_out"]
        tell(f"held out at step {row['step']}: {held_out['score']['value']:.3f}, {held_out['metrics']}")
        assert (held_out["num_prompts"], held_out["num_failed_prompts"]) == (16, 0)
        assert held_out["metrics"]["tool_use"] > 0


def test_the_reward_service_alone_answers_as_the_readme_says() -> None:
    """`up reward` starts nothing else, and a caller on this machine reaches it over gRPC and HTTP."""
    with stack() as project:
        project.compose("up", "--detach", "reward")
        (reward,) = project.containers("reward")
        took_s = project.wait_until(lambda: health(reward) == "healthy", "a healthy reward service", 120)
        tell(f"the reward service alone: healthy after {took_s:.0f} s")
        assert [service for service in SERVICES if project.containers(service)] == ["reward"]
        assert verify(project) == 1.0
        curl, program = readme_examples(project)
        done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["score"] == 1.0
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["1.0", "0.75"]
    assert leftovers(project.project) == []


def example_of_mutual_tls() -> dict[str, str]:
    """The variables that switch it on, as deploy/.env.example has them."""
    text = (ROOT / "deploy" / ".env.example").read_text()
    return dict(re.findall(r"^#   ([A-Z_]+)=(.*)$", text, re.MULTILINE))


def assert_only_members_come_in(project: Stack, certificates: SecurityConfig) -> None:
    """Over HTTP and gRPC; `certificates` are those of the stack."""
    no_certificate = certificates.model_copy(update={"tls_cert": None, "tls_key": None})
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert verify(project, bearer, security_of(certificates)) == 1.0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        verify(project, {}, security_of(certificates))
    for stranger in (security_of(no_certificate), None):
        with pytest.raises(OSError) as refused:  # noqa: PT011 - of many kinds: the connection ends
            verify(project, bearer, stranger)
        assert not isinstance(refused.value, urllib.error.HTTPError)

    async def ask_router(security: Security) -> int:
        address = f"localhost:{project.port('PENSTOCK_ROUTER_PORT')}"
        async with RouterClient(address, security=security) as client:
            return len((await client.list_replicas(timeout_s=10.0)).replicas)

    assert asyncio.run(ask_router(security_of(certificates, token=TOKEN))) == 2
    with pytest.raises(AccessError):
        asyncio.run(ask_router(security_of(certificates)))
    with pytest.raises(UnavailableError):
        asyncio.run(ask_router(security_of(no_certificate, token=TOKEN)))


def readme_examples(project: Stack) -> list[str]:
    """The README's curl command and its Python program for the reward service, with this stack's ports."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("The reward service alone") :]
    curl, program = (
        re.search(r"^    (curl .*\\\n.*)$", section, re.MULTILINE),
        re.search(r"```python\n(.*?)```", section, re.DOTALL),
    )
    assert curl is not None
    assert program is not None
    ports = {7002: "PENSTOCK_REWARD_PORT", 7003: "PENSTOCK_REWARD_HTTP_PORT"}
    return [
        re.sub("127.0.0.1:(700[23])", lambda found: f"127.0.0.1:{project.port(ports[int(found[1])])}", example[1])
        for example in (curl, program)
    ]


def tell(line: str) -> None:
    """Write a measurement; `make test-compose` lets it through."""
    sys.stdout.write(f"  {line}\n")
    sys.stdout.flush()


def verify(
    project: Stack, headers: Mapping[str, str] = MappingProxyType({}), security: Security | None = None
) -> float:
    """The score of a right answer, over HTTP; over HTTPS with a `security`."""
    body = json.dumps({"golds": ["3/4"], "response": "so it is \\boxed{0.75}.", "profile": "math"}).encode()
    scheme, context = "http", None
    if security is not None and security.tls is not None:
        scheme, context = "https", security.tls.client_context()
    url = f"{scheme}://localhost:{project.port('PENSTOCK_REWARD_HTTP_PORT')}/v1/verify"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=10, context=context) as response:
        return float(json.load(response)["score"])


def scale(project: Stack, num_rollouts: int) -> float:
    """Scale while all goes on; returns the seconds that it took."""
    started = time.monotonic()
    project.compose("up", "--detach", "--no-recreate", "--scale", f"rollout={num_rollouts}")
    return time.monotonic() - started


def num_routable(project: Stack) -> int:
    """Engines that the router gives calls to."""
    pool = describe_pool(fetch_pool(f"127.0.0.1:{project.port('PENSTOCK_ROUTER_PORT')}", Security()))
    return sum(replica["routable"] for replica in pool["replicas"])


def last_step(project: Stack) -> int:
    """The last step that is in the metrics."""
    rows = project.rows(RUN)
    return rows[-1]["step"] if rows else 0


def wait_for_steps(project: Stack, count: int) -> None:
    """Let the run go on for some steps."""
    goal = last_step(project) + count
    project.wait_until(lambda: last_step(project) >= goal, f"step {goal}", 600)


def kill_and_see_it_back(project: Stack, container: str) -> None:
    """kill -9 of the service in a container, which Docker then starts again."""
    restarts = inspect(container)["RestartCount"]
    crash(container)
    project.wait_until(lambda: inspect(container)["RestartCount"] > restarts, "a restart", 60)
    took_s = project.wait_until(lambda: health(container) == "healthy", "a healthy container", 300)
    tell(f"healthy again after {took_s:.0f} s")


def assert_each_group_once(project: Stack) -> None:
    """The accounting of the end-to-end tests, over the whole run."""
    rows = project.rows(RUN)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)), "a step is missing or there twice"
    trained = [index for row in rows for index in row["groups"]]
    lost = set(range(NUM_STEPS * GROUPS_PER_STEP)) - set(trained)
    tell(f"groups trained {len(trained)}, lost {len(lost)}, trained twice {len(trained) - len(set(trained))}")
    assert sorted(trained) == list(range(NUM_STEPS * GROUPS_PER_STEP)), "a group was lost or trained twice"
    assert all(row["staleness_max"] <= row["max_staleness"] for row in rows)
    assert rows[-1]["num_failed_groups"] == 0
    require_agreement(rows)
