"""How the chart's processes start, are watched, grow, are moved and end. Part of `make test-helm`."""

import re
from pathlib import Path

import pytest
import yaml

from penstock import config as configuration
from penstock import shipped
from services.launch.checks.given_gpus import require_gpus
from services.launch.launcher import KILL_MARGIN_S
from services.recipe import Recipe
from tests.helm.cases import CASES, EVERYTHING, PAIRS, ROOT, TEXT, TLS
from tests.helm.chart import Object, component, containers, of_kind, render, selects, workloads

STARTUP_S = {"nats": 600, "reward": 120, "router": 300, "rollout": 1800, "worker": 600, "trainer": 1800}
"""How long each may take to be ready, by the values of the chart."""


def test_every_container_is_probed_on_its_grpc_port(objects: list[Object]) -> None:
    """With TLS by a command; NATS on the port of its configuration. A process gets minutes before it is called dead."""
    nats = (ROOT / "deploy" / "docker" / "nats.conf").read_text()
    (monitored,) = re.findall(r'^http: "127\.0\.0\.1:(\d+)"', nats, re.MULTILINE)
    for name, container in containers(objects):
        if container["name"] != name:  # waits for NATS, and ends
            continue
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "grpc" in container[probe]:
                asked = [str(container[probe]["grpc"]["port"])]
            else:
                asked = re.findall(r"127\.0\.0\.1:(\d+)", " ".join(container[probe]["exec"]["command"]))
            assert asked == [monitored if name == "nats" else ports["grpc"]]
        startup, liveness = container["startupProbe"], container["livenessProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == STARTUP_S[name]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 300


def test_probes_with_tls_are_those_of_a_real_server() -> None:
    """Options that `penstock.runtime.health` knows, and files that are mounted."""
    from penstock.runtime import health

    (job,) = of_kind(render(TLS), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = container["readinessProbe"]["exec"]["command"]
    assert command[:3] == ["python3", "-m", "penstock.runtime.health"]
    with pytest.raises(SystemExit):
        health.main(command[3:])  # it gets as far as the files, which are the pod's
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for option in [part for part in command if "/var/run/" in part]:
        assert str(Path(option.partition("=")[2]).parent) in mounted


def test_every_container_has_its_limits(objects: list[Object]) -> None:
    """Memory that it asks for is memory that it gets; /dev/shm is part of it."""
    for each in workloads(objects):
        spec = each["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            resources = container["resources"]
            assert resources["limits"]["memory"] == resources["requests"]["memory"]
            assert "cpu" in resources["requests"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        claimed = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        mounts = [mount for container in spec["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes.keys() | claimed
        assert "/tmp" in [mount["mountPath"] for mount in mounts]  # the root is read-only
        if component(each) in ("rollout", "trainer"):
            assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
            assert {"name": "shm", "mountPath": "/dev/shm"} in mounts


def test_what_it_was_given_reaches_the_pods() -> None:
    """GPUs of engines and trainer, and where pods may run."""
    found = {each["metadata"]["name"]: each for each in workloads(render(PAIRS))}
    assert found.keys() == {f"demo-{name}" for name in (
        "nats", "reward", "rollout-decode", "rollout-prefill", "router", "trainer", "worker"
    )}  # fmt: skip
    prefill = found["demo-rollout-prefill"]["spec"]["template"]["spec"]
    assert prefill["containers"][0]["resources"]["limits"] == {"memory": "6Gi", "nvidia.com/gpu": 2}
    assert {"--rollout.role=prefill", "--rollout.tensor_parallel=2"} <= {*prefill["containers"][0]["args"]}
    assert found["demo-rollout-decode"]["spec"]["replicas"] == 4
    assert found["demo-rollout-decode"]["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    full = {component(each): each for each in workloads(render(EVERYTHING))}
    assert full["trainer"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert full["trainer"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    router = full["router"]["spec"]["template"]
    assert router["metadata"]["labels"]["team"] == "a"
    assert router["spec"]["containers"][0]["image"] == "registry.example.com/team/penstock-router:v2"
    assert {"name": "EXTRA", "value": "1"} in router["spec"]["containers"][0]["env"]
    runs = [mount for mount in full["rollout"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert {"name": "runs", "mountPath": "/penstock/runs"} in runs
    changed = render({"recipe": {"text": TEXT + "# changed\n"}})
    before, after = (
        {component(each): each["spec"]["template"]["metadata"] for each in workloads(found)}
        for found in (render({"recipe": {"text": TEXT}}), changed)
    )
    assert before["router"] != after["router"]
    assert before["nats"] == after["nats"], "it has no recipe, and everything would wait for its restart"


def test_processes_take_their_arguments(objects: list[Object]) -> None:
    """Every setting exists and has a value that it can have; the recipe is one that is there."""
    for name, container in containers(objects):
        if name == "nats" or container["name"] != name:
            continue
        arguments = container["args"]
        assert arguments[0] == "--config"
        recipe = TEXT if arguments[1] == "/etc/penstock/recipe.toml" else shipped.named_recipe(arguments[1]).read_text()
        overrides = [each.replace("$(POD_IP)", "10.0.0.7") for each in arguments[2:] if "." in each.partition("=")[0]]
        loaded = configuration.load(Recipe, [shipped.named_recipe("tiny-cpu")], overrides)
        assert recipe == TEXT
        assert loaded.run.name in ("demo", "second")
        assert bool(loaded.bus.url) == (name != "reward")
        rest = {each.partition("=")[0] for each in arguments[2:]} - {each.partition("=")[0] for each in overrides}
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert rest == {*(["--stopped-exit-code"] if name == "trainer" else []), *(["--gpus"] if gpus else [])}
        if gpus:
            assert f"--gpus={gpus}" in arguments
            require_gpus(loaded, name, num_gpus=gpus)
        if name in ("rollout", "trainer"):
            assert loaded.network.advertise_host == "10.0.0.7"
        if name == "worker":
            assert loaded.worker.router_url.startswith("https:") == bool(loaded.security.tls_cert)
            services = {each["metadata"]["name"]: each for each in of_kind(objects, "Service")}
            for address in (loaded.worker.router_address, loaded.worker.reward_address, loaded.worker.router_url):
                host, port = address.rpartition("/")[2].split(":")
                assert int(port) in [each["port"] for each in services[host]["spec"]["ports"]]


def test_a_process_has_time_to_end(objects: list[Object]) -> None:
    """Kubernetes kills after the grace period; what a process does by itself before its end fits in."""
    recipe = configuration.load(Recipe, [shipped.named_recipe("rlinf-geo3k-grpo")], [])
    for each in workloads(objects):
        seconds = each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert seconds >= recipe.run.grace_s + KILL_MARGIN_S
        assert component(each) != "trainer" or seconds >= 900


def test_the_job_ends_where_a_person_must_act_and_only_there() -> None:
    """Exit code 2 fails it at once, an evicted trainer does not count, and neither does it look finished."""
    (job,) = of_kind(render(), "Job")
    first, second = job["spec"]["podFailurePolicy"]["rules"]
    assert first == {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [2]}}
    assert second["action"] == "Ignore"
    assert second["onPodConditions"][0]["type"] == "DisruptionTarget"
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert [container["name"] for container in pod["containers"]] == ["trainer"]
    assert "--stopped-exit-code=143" in pod["containers"][0]["args"]
    assert [container["name"] for container in pod["initContainers"]] == ["wait-for-nats"]


def test_a_budget_lets_a_node_be_drained(objects: list[Object]) -> None:
    """One pod at a time, of what can lose one; a budget of the trainer's or NATS' would hold the node for ever."""
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert {component(each) for each in budgets} == {"reward", "router", "worker", "rollout"}
    for each in budgets:
        assert each["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in each["spec"]
        assert each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for each in of_kind(objects, "Deployment"):  # two budgets of one pod make its eviction an error
        pod = each["spec"]["template"]
        assert sum(selects(budget["spec"]["selector"]["matchLabels"], pod) for budget in budgets) == 1
    assert len(budgets) == len(of_kind(objects, "Deployment"))


def test_engines_are_replaced_on_the_gpus_that_they_have(objects: list[Object]) -> None:
    """One after the other, without a further one."""
    for each in of_kind(objects, "Deployment"):
        if component(each) == "rollout":
            assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_reward_service_grows_with_its_load() -> None:
    """Its Deployment then has no number of its own, which an upgrade would restore."""
    objects = render()
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    (reward,) = [each for each in of_kind(objects, "Deployment") if component(each) == "reward"]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", reward["metadata"]["name"])
    assert "replicas" not in reward["spec"]
    assert scaler["spec"]["minReplicas"] == 2
    assert scaler["spec"]["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}
    assert "cpu" in reward["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    without = render({"reward": {"autoscaling": {"enabled": False}, "replicas": 3}})
    assert of_kind(without, "HorizontalPodAutoscaler") == []
    assert [each["spec"]["replicas"] for each in of_kind(without, "Deployment") if component(each) == "reward"] == [3]


def test_prometheus_gets_the_alerts_and_the_labels_that_they_use() -> None:
    """The rules are those that `make test-observability` tests."""
    (rule,) = of_kind(render(CASES["monitored"]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    (monitor,) = of_kind(render(EVERYTHING), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {each["targetLabel"] for each in endpoint["relabelings"]} == {"job", "run", "service", "instance"}
    assert endpoint["tlsConfig"]["keySecret"] == {"name": "penstock-tls", "key": "tls.key"}
    labels = monitor["spec"]["selector"]["matchLabels"]
    for service in of_kind(render(EVERYTHING), "Service"):
        assert selects(labels, service)
    for service in of_kind(render(release="another"), "Service"):
        assert not selects(labels, service)
