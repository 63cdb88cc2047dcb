"""The Helm chart, rendered by Helm's own code and checked against Kubernetes' schemas: `make test-helm`.

That the rendered pods train is tested by `make test-helm-pods`. No cluster takes part.
"""

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from penstock import config as configuration
from penstock import shipped
from services.launch.launcher import KILL_MARGIN_S
from services.recipe import Recipe
from tests.helm.chart import CHART, ROOT, Object, component, containers, of_kind, render, selects, workloads

TEXT = (ROOT / "recipes" / "tiny-cpu.toml").read_text()
TLS = {"tls": {"secret": "penstock-tls", "mutual": True}}
ELSEWHERE = {"nats": {"enabled": False, "url": "nats://nats.bus.svc:4333"}}
PAIRS = {
    "rollout": {
        "pools": {
            "unified": None,
            "prefill": {"role": "prefill", "gpus": 2, "settings": ["rollout.tensor_parallel=2"]},
            "decode": {"role": "decode", "replicas": 4, "nodeSelector": {"gpu": "h200"}},
        }
    }
}
CLAIMS = {
    "models": {"existingClaim": "models"},
    "data": {"existingClaim": "data"},
    "huggingFace": {"existingClaim": "hub", "offline": True, "tokenSecret": "hub"},
    "runs": {"existingClaim": "runs", "mountedByEngines": True},
    "secrets": {"existing": "tokens", "remoteToken": True, "environmentToken": True},
}
EVERYTHING = {
    **CLAIMS,
    **TLS,
    "recipe": {"text": TEXT},
    "run": "second",
    "settings": ["trainer.num_steps=7"],
    "image": {"registry": "registry.example.com/team", "tag": "v2", "pullSecrets": ["pull"]},
    "router": {
        "replicas": 2,
        "settings": ["router.balancing=consistent_hash"],
        "allowFrom": [{"podSelector": {"matchLabels": {"agent": "yes"}}}],
        "env": [{"name": "EXTRA", "value": "1"}],
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "reward": {"autoscaling": {"enabled": False}, "replicas": 3},
    "trainer": {"gpus": 4, "settings": ["trainer.ranks=4"], "jobLabels": {"kueue.x-k8s.io/queue-name": "research"}},
    "monitoring": {"serviceMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"internet": False, "egress": {"reward": [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}]}]}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recipe": {"recipe": {"text": TEXT}},
    "tls": TLS,
    "elsewhere": ELSEWHERE,
    "pairs": PAIRS,
    "claims": CLAIMS,
    "everything": EVERYTHING,
    "monitored": {"monitoring": {"serviceMonitor": True, "rules": True}},
    "serving": {"trainer": {"enabled": False}, "networkPolicy": {"enabled": False}},
}

VERSIONS = ("1.29", "1.33", "1.37")
CRDS = Path(__file__).with_name("crds")

PORTS = {
    "nats": {4222},
    "reward": {7002, 7003, 9400},
    "router": {7001, 7080, 9400},
    "rollout": {7010, 9400},
    "worker": {7004, 9400},
    "trainer": {7000, 9400},
}
STARTUP_S = {"nats": 600, "reward": 120, "router": 300, "rollout": 1800, "worker": 600, "trainer": 1800}
"""How long each may take to be ready, by the values of the chart."""
ANY = 55555
"""Stands for the ports that process groups choose."""
PICTURE = {
    ("trainer", "nats", 4222),
    ("worker", "nats", 4222),
    ("worker", "router", 7001),
    ("worker", "router", 7080),
    ("router", "rollout", 7010),
    ("worker", "reward", 7002),
}
"""The arrows of docs/architecture.md; those of NATS to its clients are connections that the clients open."""
LEASES = {("router", "nats", 4222), ("rollout", "nats", 4222)}
MESH = {
    (source, target, port)
    for source, target in (("trainer", "rollout"), ("rollout", "trainer"), ("rollout", "rollout"))
    for port in (*PORTS[target], ANY)
}
"""Weights, and KV caches between prefill and decode engines: all members connect to each other."""


@pytest.fixture(params=CASES, scope="module")
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of a release."""
    return render(CASES[request.param])


def pods(objects: list[Object]) -> list[Object]:
    """The templates of all pods."""
    return [each["spec"]["template"] for each in workloads(objects)]


def test_helm_finds_nothing_to_say() -> None:
    """Neither errors nor warnings."""
    report = helm_python.lint(CHART, strict=True)
    said = [each for each in report["messages"] if each["severity"] > 1]
    assert (said, report["errors"] or []) == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(objects: list[Object], version: str) -> None:
    """By the strict schemas of its versions, and of the Prometheus operator: no unknown field, no wrong type."""
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in objects]
    assert len({*names}) == len(names)
    for each in objects:
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            schema = json.loads((CRDS / f"{each['kind'].lower()}.json").read_text())
            jsonschema.validate(each, strict(schema | {"properties": schema["properties"] | {"metadata": {}}}))
        else:
            kubernetes_validate.validate(each, version, strict=True)


def strict(schema: Any) -> Any:
    """The schema, with no property but those that it names."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if str(closed.get("pattern")).startswith("^(?i)"):  # Go's, which Python does not take
        del closed["pattern"]
    is_open = "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        closed["additionalProperties"] = False
    return closed


def test_the_schemas_are_strict() -> None:
    """What they are there for: misspelt fields, and a gRPC probe that asks for TLS, which there is none of."""
    schema = strict(json.loads((CRDS / "servicemonitor.json").read_text()))
    (monitor,) = of_kind(render(CASES["monitored"]), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["intervall"] = "5s"
    with pytest.raises(jsonschema.ValidationError, match="intervall"):
        jsonschema.validate(monitor, schema)
    (job,) = of_kind(render(), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["tls"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="tls"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_selectors_select_their_own_pods_and_no_others(objects: list[Object]) -> None:
    """Of workloads, Services, budgets, policies, and the spread over nodes; pods of another release are others."""
    own, others = pods(objects), pods(render(release="another"))
    templates = [*own, *others]
    for each in workloads(objects):
        if each["kind"] != "Job":
            labels = each["spec"]["selector"]["matchLabels"]
            assert [pod for pod in templates if selects(labels, pod)] == [each["spec"]["template"]]
        for constraint in each["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"]["matchLabels"], each["spec"]["template"])
    for each in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = each["spec"]
        labels = {
            "Service": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        }[each["kind"]](spec)
        chosen = [pod for pod in templates if selects(labels, pod)]
        assert {component(pod) for pod in chosen} == {component(each)}, each["metadata"]["name"]
        assert not [pod for pod in chosen if pod in others], each["metadata"]["name"]


def test_every_port_is_in_a_service_under_its_name(objects: list[Object]) -> None:
    """And is the one on which the image's command listens."""
    offered: dict[str, dict[str, int]] = {}
    for service in of_kind(objects, "Service"):
        assert service["spec"]["clusterIP"] == "None"
        assert all(port["targetPort"] == port["name"] for port in service["spec"]["ports"])
        offered[component(service)] = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for name, container in containers(objects):
        if container["name"] == name:
            assert {port["name"]: port["containerPort"] for port in container["ports"]} == offered[name]
            assert {*offered[name].values()} == PORTS[name]
            dockerfile = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
            given = dockerfile.partition("ENTRYPOINT")[2] + json.dumps(container.get("args", []))
            if name != "nats":
                assert {int(port) for port in re.findall(r"port=(\d+)", given)} == PORTS[name]


def test_exactly_the_arrows_of_the_picture_are_open() -> None:
    """At both ends; pods that no policy selects would be open to all."""
    expected = PICTURE | LEASES | MESH
    for values in ({}, PAIRS, TLS):
        objects = render({**values, "networkPolicy": {"internet": False}})
        policies = of_kind(objects, "NetworkPolicy")
        templates = pods(objects)
        found = {
            (component(source), component(target), port)
            for source in templates
            for target in templates
            for port in (ANY, *PORTS[component(target)])
            if is_open(policies, source, target, port)
        }
        assert found == expected
        for policy in policies:
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            # Only pods of the release: no blocks of addresses, no namespaces, and no rule for everybody.
            peers = [rule["from"] for rule in policy["spec"]["ingress"]]
            peers += [rule["to"] for rule in policy["spec"]["egress"] if "to" in rule]
            assert all(peers)
            assert {key for each in peers for peer in each for key in peer} <= {"podSelector"}
            beyond = [rule for rule in policy["spec"]["egress"] if "to" not in rule]
            names = [] if component(policy) in ("nats", "reward") else [{("UDP", 53), ("TCP", 53)}]
            assert [{(port["protocol"], port["port"]) for port in rule["ports"]} for rule in beyond] == names


def is_open(policies: list[Object], source: Object, target: Object, port: int) -> bool:
    """Whether a pod may connect to a pod on a port: by its own policies, and by the other's."""

    def is_among(given: Object) -> bool:
        first = int(given["port"])
        return given["protocol"] == "TCP" and first <= port <= int(given.get("endPort", first))

    def admits(rules: list[Object], side: str, peer: Object) -> bool:
        return any(
            any(
                selects(each["podSelector"]["matchLabels"], peer)
                for each in rule.get(side, [])
                if "podSelector" in each
            )
            and ("ports" not in rule or any(is_among(each) for each in rule["ports"]))
            for rule in rules
        )

    def rules(pod: Object, direction: str) -> list[Object]:
        own = [each for each in policies if selects(each["spec"]["podSelector"]["matchLabels"], pod)]
        assert own, "no policy selects the pod"
        return [rule for each in own for rule in each["spec"][direction]]

    return admits(rules(source, "egress"), "to", target) and admits(rules(target, "ingress"), "from", source)


def test_the_picture_is_that_of_the_document() -> None:
    """docs/architecture.md draws the arrows that PICTURE has, and weights, which are part of MESH."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Processes")[2].partition("```\n")[0]
    drawn = set()
    for line in re.findall(r"^    (.*)$", text, re.MULTILINE):
        names = [re.split(r"[\[(]", part.strip())[0] for part in re.split(r"-- .*? -->|-\. .*? \.->|-->", line)]
        drawn |= {frozenset(pair) for pair in itertools.pairwise(names)}
    known = {frozenset({source, target}) for source, target, _ in PICTURE} | {frozenset({"trainer", "rollout"})}
    assert {frozenset("rollout" if name == "engine" else name for name in pair) for pair in drawn} == known


def test_outside_its_own_pods_a_release_reaches_what_was_asked_for() -> None:
    """NATS elsewhere, the internet for models, what a remote verifier needs; and monitoring and callers get in."""

    def policy(objects: list[Object], name: str) -> Object:
        return next(each for each in of_kind(objects, "NetworkPolicy") if component(each) == name)["spec"]

    elsewhere = render(ELSEWHERE)
    assert not any(component(each) == "nats" for each in elsewhere)
    for name in ("router", "rollout", "worker", "trainer"):
        egress = policy(elsewhere, name)["egress"]
        assert {"ports": [{"protocol": "TCP", "port": 4333}]} in egress
        assert {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"protocol": "TCP", "port": 443}]} in egress
    full = render(EVERYTHING)
    assert policy(full, "reward")["egress"][0] == {"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}]}
    (caller,) = [
        rule for rule in policy(full, "router")["ingress"] if rule["from"] == EVERYTHING["router"]["allowFrom"]
    ]
    assert {port["port"] for port in caller["ports"]} == {7001, 7080}
    for name in set(PORTS) - {"nats"}:
        monitored = [rule for rule in policy(full, name)["ingress"] if "namespaceSelector" in rule["from"][0]]
        assert [[port["port"] for port in rule["ports"]] for rule in monitored] == [[9400]]
        assert not any("namespaceSelector" in rule["from"][0] for rule in policy(render(), name)["ingress"])


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
    notes = [
        each["spec"]["template"]["metadata"]["annotations"]
        for each in workloads(changed)
        if component(each) == "router"
    ]
    assert notes != [
        each["spec"]["template"]["metadata"]["annotations"]
        for each in workloads(render({"recipe": {"text": TEXT}}))
        if component(each) == "router"
    ]


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


def test_clients_find_pods_that_are_ready(objects: list[Object]) -> None:
    """And NATS before it is."""
    early = [each for each in of_kind(objects, "Service") if each["spec"].get("publishNotReadyAddresses")]
    assert {component(each) for each in early} <= {"nats"}
    assert len(early) == len(of_kind(objects, "StatefulSet"))


def test_what_needs_nats_waits_for_it() -> None:
    """At the address that its process has."""
    for values, address in (({}, ["demo-nats", "4222"]), (ELSEWHERE, ["nats.bus.svc", "4333"])):
        waits = {name: each for name, each in containers(render(values)) if each["name"] != name}
        assert waits.keys() == {"router", "rollout", "worker", "trainer"}
        assert [each["args"][1:] for each in waits.values()] == [address] * 4


def test_nats_keeps_its_streams_in_the_claim() -> None:
    """Which is larger than the bounds of a run's streams, 5 GiB (docs/operation/bus.md): a full disk stops a run."""
    (nats,) = of_kind(render(), "StatefulSet")
    (claim,) = nats["spec"]["volumeClaimTemplates"]
    (folder,) = re.findall(
        r'^  store_dir: "(.*)"', (ROOT / "deploy" / "docker" / "nats.conf").read_text(), re.MULTILINE
    )
    (container,) = nats["spec"]["template"]["spec"]["containers"]
    assert {"name": claim["metadata"]["name"], "mountPath": folder} in container["volumeMounts"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert int(size.removesuffix("Gi")) > 5


def test_models_and_data_are_read_only_and_the_hub_is_not_asked() -> None:
    """Where the values say so."""
    for values, hub in ((CLAIMS, {"offline": True}), ({}, {"offline": False})):
        for name, container in containers(render(values)):
            mounts = {mount["name"]: mount for mount in container.get("volumeMounts", [])}
            for folder in mounts.keys() & {"models", "datasets"}:
                assert mounts[folder]["readOnly"]
            if "hf" in mounts:
                assert mounts["hf"].get("readOnly", False) == hub["offline"]
                assert {"name": "HF_HUB_OFFLINE", "value": str(int(hub["offline"]))} in container["env"]
            elif container["name"] == name:
                assert name in ("nats", "reward")


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


def test_nothing_runs_as_root_or_writes_where_it_should_not(objects: list[Object]) -> None:
    """What the restricted profile of Pod Security Standards asks for, and a read-only root; no token of the cluster."""
    for each in workloads(objects):
        spec = each["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert min(spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")) > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])
    for _, container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


SECRETS = {
    "nats": {"nats-token"},
    "reward": {"token"},
    "router": {"token", "nats-token", "control-token"},
    "rollout": {"token", "nats-token", "control-token"},
    "worker": {"token", "nats-token"},
    "trainer": {"token", "nats-token", "control-token"},
}


def test_secrets_are_files_of_those_who_need_them() -> None:
    """Neither arguments nor variables hold one, and no other object does."""
    objects = render(CASES["monitored"])
    (secret,) = of_kind(objects, "Secret")
    tokens = [base64.b64decode(value).decode() for value in secret["data"].values()]
    assert len({*tokens}) == 3
    assert min(map(len, tokens)) >= 32
    others = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert not [value for value in [*tokens, *secret["data"].values()] if value in others]
    more = {"reward": {"remote-token"}, "worker": {"environment-token"}}
    for values, given in (({}, {}), (CLAIMS, more)):
        for each in workloads(render(values)):
            spec = each["spec"]["template"]["spec"]
            wanted = SECRETS[component(each)] | given.get(component(each), set())
            (volume,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "secrets"]
            assert {item["key"] for item in volume["items"]} == wanted
            assert volume["defaultMode"] == 0o440
            assert volume["secretName"] == ("tokens" if values else "demo-secrets")
            (container,) = spec["containers"]
            variables = {
                env["name"]: env.get("value") for env in container["env"] if env["name"].startswith("PENSTOCK_")
            }
            (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "secrets"]
            assert variables == {f"PENSTOCK_{key.upper().replace('-', '_')}_FILE": f"{folder}/{key}" for key in wanted}
            for other in [*spec.get("initContainers", []), container]:
                assert "secretKeyRef" not in json.dumps(other)
                assert "secretRef" not in json.dumps(other)
                assert "token" not in json.dumps(other.get("args", []))


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
        assert rest == ({"--stopped-exit-code"} if name == "trainer" else set())
        if name in ("rollout", "trainer"):
            assert loaded.network.advertise_host == "10.0.0.7"
        if name == "worker":
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


def test_results_outlive_the_release() -> None:
    """`helm uninstall` keeps the claim of the runs; a claim of one's own is used in its place."""
    (claim,) = of_kind(render(), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert of_kind(render(CLAIMS), "PersistentVolumeClaim") == []
    (job,) = of_kind(render(CLAIMS), "Job")
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in job["spec"]["template"]["spec"][
        "volumes"
    ]


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


MISTYPED = {
    "replica": {"router": {"replica": 2}},
    "gpu": {"rollout": {"pools": {"unified": {"gpu": 1}}}},
    "role": {"rollout": {"pools": {"unified": {"role": "prefil"}}}},
    "memory": {"trainer": {"resources": {"limits": {"memory": "96gb"}}}},
    "settings": {"settings": ["--trainer.num_steps=5"]},
    "text": {"recipe": {"txt": "x"}},
    "url": {"nats": {"enabled": False}},
    "remoteToken": {"secrets": {"remoteToken": True}},
    "mountedByEngines": {"runs": {"mountedByEngines": True}},
    "prefill and decode": {"rollout": {"pools": {"unified": {"role": "decode"}}}},
}


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_value_is_named(name: str) -> None:
    """Before anything is installed."""
    with pytest.raises(helm_python.HelmError) as refused:
        render(MISTYPED[name])
    where = next(iter(MISTYPED[name]))
    assert name in str(refused.value) or where in str(refused.value)
    assert where in str(refused.value)


def test_the_packaged_chart_is_the_same(tmp_path: Path) -> None:
    """The alerts, too, which are a link in the source."""
    with helm_python.Chart.load(CHART) as chart:
        package = chart.save(tmp_path)
    values = {**CASES["monitored"], "secrets": {"existing": "tokens"}}
    assert render(values, chart=Path(package)) == render(values)


EXAMPLES = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/operation/kubernetes.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_document_render(example: str) -> None:
    """Kubernetes takes the objects, and the processes their recipe and settings."""
    objects = render(yaml.safe_load(example))
    for each in of_kind(objects, "Deployment", "Job", "StatefulSet", "NetworkPolicy"):
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    for name, container in containers(objects):
        if container["name"] == name != "nats":
            overrides = [each for each in container["args"] if "." in each.partition("=")[0]]
            configuration.load(Recipe, [shipped.named_recipe(container["args"][1])], overrides)


def test_every_value_is_listed() -> None:
    """In values.yaml, whose comments name what every process takes besides."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    text = (CHART / "values.yaml").read_text()
    (besides,) = re.findall(r"^# Each also takes: ((?:.*\n# )*.*)\.$", text, re.MULTILINE)
    named = {*re.findall(r"\w+", besides)}

    def missing(schema: Object, values: Object, place: str) -> list[str]:
        found = []
        for name, each in schema.get("properties", {}).items():
            if name in values:
                found += missing(each, values[name], f"{place}.{name}") if isinstance(values[name], dict) else []
            elif name not in named:
                found.append(f"{place}.{name}")
        return found

    not_listed = [each for each in missing(schema, yaml.safe_load(text), "") if each.count(".") > 1]
    assert not_listed == [".networkPolicy.egress." + name for name in PORTS]
