"""The Helm chart, rendered by Helm's own code and checked against Kubernetes' schemas: `make test-helm`.

That the rendered pods train is tested by `make test-helm-pods`. No cluster takes part.
"""

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
from services.recipe import Recipe
from tests.helm.cases import CASES, PORTS, ROOT
from tests.helm.chart import CHART, Object, component, containers, of_kind, pods, render, selects, workloads

VERSIONS = ("1.29", "1.33", "1.37")
CRDS = Path(__file__).with_name("crds")


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


@pytest.mark.parametrize("values", [{}, {"spreadOver": ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]}])
def test_replicas_spread_over_nodes(values: dict[str, list[str]]) -> None:
    """Those of each Deployment, by default over hosts."""
    spread = {}
    for each in of_kind(render(values), "Deployment"):
        constraints = each["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        spread[component(each)] = [constraint["topologyKey"] for constraint in constraints]
    over = values.get("spreadOver", ["kubernetes.io/hostname"])
    assert spread == dict.fromkeys(("reward", "router", "rollout", "worker"), over)


@pytest.mark.parametrize("release", ["team.vl-8b", "a-name.of-which.forty.characters-are.ke.pt"])
def test_a_name_with_dots_names_services(release: str) -> None:
    """Which take none, and addresses name the services."""
    objects = render(release=release)
    names = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    assert all(re.fullmatch("[a-z][-a-z0-9]{,61}[a-z0-9]", name) for name in names)
    (worker,) = [each for name, each in containers(objects) if name == each["name"] == "worker"]
    addressed = re.findall(r"address=(.*):", "\n".join(worker["args"]))
    assert len(addressed) == 2
    assert names >= {*addressed}


def test_a_name_that_begins_with_a_digit_is_refused() -> None:
    """By which no service can be called."""
    with pytest.raises(helm_python.HelmError, match=r"release name '7b' .* begins with a letter"):
        render(release="7b")


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
