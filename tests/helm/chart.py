"""The chart of deploy/helm, rendered by Helm's own code, as objects of Kubernetes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.helm.cases import ROOT

CHART = ROOT / "deploy" / "helm"
RELEASE = "demo"

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one."""


def render(values: Mapping[str, Any] | None = None, *, chart: Path = CHART, release: str = RELEASE) -> list[Object]:
    """All objects of a release, sorted by kind and name.

    Raises:
        helm_python.HelmError: the values do not fit the schema, or a template refuses them.
    """
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(dict(values or {}))
        files = loaded.render(dict(values or {}), name=release, namespace="training")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Those of the kinds."""
    return [each for each in objects if each["kind"] in kinds]


def workloads(objects: list[Object]) -> list[Object]:
    """What has pods."""
    return of_kind(objects, "Deployment", "StatefulSet", "Job")


def component(thing: Object) -> str:
    """The process that an object, or a pod's template, is about."""
    return str(thing["metadata"]["labels"]["app.kubernetes.io/component"])


def containers(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every container with the component it belongs to, init containers included."""
    for each in workloads(objects):
        spec = each["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield component(each), container


def selects(labels: Mapping[str, str], pod: Object) -> bool:
    """Whether matchLabels select a pod of the template."""
    return labels.items() <= pod["metadata"]["labels"].items()


def pods(objects: list[Object]) -> list[Object]:
    """The templates of all pods."""
    return [each["spec"]["template"] for each in workloads(objects)]
