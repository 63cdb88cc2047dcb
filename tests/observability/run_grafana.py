"""The dashboards by Grafana's own schema, which `make test-observability` fetches; Grafana itself is not started.

The schema is that of Grafana's foundation SDK: the fields of dashboards, panels and queries, and the values of those
that have few.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pydantic
import pytest
from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units

from tests.observability.servers import DEPLOY

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # it prefers another format of dashboards
    from grafana_foundation_sdk.models.dashboard import Dashboard

FILES = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def mistakes(content: dict[str, Any]) -> list[str]:
    """Fields that the schema does not have, values that they do not take, panels and units that do not exist."""
    plugins.register_default_plugins()
    board = Dashboard.from_json(content)
    found = [*_lost(content, json.loads(json.dumps(board, cls=JSONEncoder)), "")]
    for path, part in _parts(board, ""):
        for name, hint in get_type_hints(type(part)).items():
            try:
                pydantic.TypeAdapter(hint, config={"arbitrary_types_allowed": True}).validate_python(vars(part)[name])
            except pydantic.ValidationError as error:
                found.append(f"{path}.{name}: {error.errors()[0]['msg']}")
    known_units = {value for value in vars(units).values() if isinstance(value, str)}
    for panel in content["panels"]:
        if panel["type"] == "row":
            continue
        if runtime.panelcfg_config(panel["type"]) is None:
            found.append(f"{panel['title']}: no panel has the type {panel['type']}")
        if (unit := panel["fieldConfig"]["defaults"].get("unit", "none")) not in known_units:
            found.append(f"{panel['title']}: there is no unit {unit}")
    return found


def _lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """What the schema leaves out or changes, because it does not know it."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from _lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for order, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{path}[{order}]")
    elif given != kept:
        yield f"{path}: {given!r} is unknown"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each object of the schema in `value`."""
    if isinstance(value, list | dict):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(each, f"{path}[{name!r}]")
    elif type(value).__module__.startswith("grafana_foundation_sdk.") and not isinstance(value, Enum):
        yield path, value
        for name, each in vars(value).items():
            yield from _parts(each, f"{path}.{name}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grafana_s_schema_knows_everything_in_a_dashboard(file: Path) -> None:
    """What it does not know, Grafana ignores or shows as an error."""
    assert mistakes(json.loads(file.read_text())) == []


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the last of `path` at the rest of it, in the dashboard's panel "Reward"."""
    *places, name, value = path

    def change(content: dict[str, Any]) -> None:
        part = next(panel for panel in content["panels"] if panel["type"] == "timeseries")
        for place in places:
            part = part[place]
        part[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("type", "timeserie"),
        _set("options", "tooltipp", {}),
        _set("options", "legend", "displayMode", "lst"),
        _set("targets", 0, "legendFromat", "{{run}}"),
        _set("targets", 0, "expr", 5),
        _set("fieldConfig", "defaults", "unit", "shrt"),
        _set("fieldConfig", "defaults", "custom", "lineWidht", 1),
        _set("fieldConfig", "defaults", "custom", "showPoints", "nevr"),
        lambda content: content["templating"]["list"][1].update(type="qery"),
        lambda content: content["annotations"]["list"][0].update(titleFormt=""),
    ],
)
def test_a_mistake_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    """So that the test of the dashboards can fail."""
    content = json.loads(FILES[0].read_text())
    change(content)
    assert len(mistakes(content)) == 1
