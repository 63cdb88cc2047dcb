"""Who reaches whom in a release: ports, services and network policies. Part of `make test-helm`."""

import itertools
import json
import re
import socket
import subprocess
import sys

import pytest

from tests.helm.cases import CLUSTER, ELSEWHERE, EVERYTHING, PAIRS, PORTS, ROOT, TLS
from tests.helm.chart import Object, component, containers, of_kind, pods, render, selects

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

    for values, ports in ((ELSEWHERE, [4333]), (CLUSTER, [4222, 4333])):
        elsewhere = render(values)
        assert not any(component(each) == "nats" for each in elsewhere)
        for name in ("router", "rollout", "worker", "trainer"):
            egress = policy(elsewhere, name)["egress"]
            to_nats = [rule["ports"][0]["port"] for rule in egress if "to" not in rule and len(rule["ports"]) == 1]
            assert to_nats == ports
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


@pytest.mark.parametrize("given", [[], None])
def test_an_empty_list_lets_nobody_in(given: list[Object] | None) -> None:
    """Not everybody, whom a rule without sources admits."""
    allowed = {"allowFrom": given}
    objects = render({"monitoring": {"serviceMonitor": True, **allowed}, "router": allowed, "reward": allowed})
    for each in of_kind(objects, "NetworkPolicy"):
        assert all(rule["from"] for rule in each["spec"]["ingress"]), component(each)


def test_clients_find_pods_that_are_ready(objects: list[Object]) -> None:
    """And NATS before it is."""
    early = [each for each in of_kind(objects, "Service") if each["spec"].get("publishNotReadyAddresses")]
    assert {component(each) for each in early} <= {"nats"}
    assert len(early) == len(of_kind(objects, "StatefulSet"))


def test_what_needs_nats_waits_for_it() -> None:
    """At the addresses that its process has."""
    for values, addresses in (
        ({}, ["demo-nats:4222"]),
        (ELSEWHERE, ["nats.bus.svc:4333"]),
        (CLUSTER, ["a.bus.svc:4222", "b.bus.svc:4333", "c.bus.svc:4222"]),
    ):
        waits = {name: each for name, each in containers(render(values)) if each["name"] != name}
        assert waits.keys() == {"router", "rollout", "worker", "trainer"}
        assert [each["args"][1:] for each in waits.values()] == [addresses] * 4


def test_the_wait_ends_when_any_server_answers() -> None:
    """One of a cluster may be away."""
    wait = next(each for name, each in containers(render()) if each["name"] != name)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, server)]
        command = [sys.executable, *wait["command"][1:], wait["args"][0], *addresses]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith(f"waiting for NATS at {addresses[0]}: ")
    assert said.count("\n") == 1
