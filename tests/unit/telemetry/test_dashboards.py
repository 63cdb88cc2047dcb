"""The dashboards for Grafana, and their provisioning in the compose stack; `make test-observability` has their schema.

Grafana shows a panel whose variable or source does not exist, or that lies on another one, without an error.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

_DEPLOY = Path(__file__).parents[3] / "deploy"
_FILES = sorted((_DEPLOY / "grafana" / "dashboards").glob("*.json"))
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_GRAFANA = {"__rate_interval"}
"""Variables that are always there."""
_NUM_COLUMNS = 24


def read(path: Path) -> Any:
    """A YAML file, or a JSON file, which is one too."""
    return yaml.safe_load(path.read_text())


@pytest.fixture(params=_FILES, ids=lambda file: file.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each of them."""
    content: dict[str, Any] = read(request.param)
    return content


def test_grafana_finds_its_dashboards_and_their_source() -> None:
    """The provisioned folders are mounted, the first page is one of them, and the source is the stack's Prometheus."""
    services = read(_DEPLOY / "docker-compose.observability.yml")["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    provisioning = _DEPLOY / "grafana" / "provisioning"
    provider = read(provisioning / "dashboards" / "penstock.yml")["providers"][0]
    assert (provider["type"], provider["options"]["path"]) == ("file", mounts["./grafana/dashboards"])
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(mounts["./grafana/dashboards"])
    assert Path(home).name in {file.name for file in _FILES}
    [source] = read(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    published = services["prometheus"]["ports"][0]
    assert (source["url"], published.rpartition(":")[2]) == ("http://prometheus:9090", "9090")
    assert len({read(file)["uid"] for file in _FILES}) == len(_FILES) == 2


def test_panels_ask_the_source_that_the_reader_chooses(dashboard: dict[str, Any]) -> None:
    """Also the list of runs and the marks of alerts."""
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", "run"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asking = [variables["run"], *dashboard["annotations"]["list"], *panels]
    asking += [target for panel in panels for target in panel["targets"]]
    assert [each for each in asking if each["datasource"] != _SOURCE] == []
    assert [panel["title"] for panel in panels if not panel["targets"]] == []


def test_variables_that_are_used_exist(dashboard: dict[str, Any]) -> None:
    """In queries, titles and legends."""
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - {"__all"} == known | (used & _OF_GRAFANA)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert [query for query in queries if 'run=~"$run"' not in query] == []


def test_panels_lie_beside_each_other(dashboard: dict[str, Any]) -> None:
    """Each on its own place of the grid, under its own number; so are the queries of each."""
    numbers = Counter(panel["id"] for panel in dashboard["panels"])
    assert max(numbers.values()) == 1
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= _NUM_COLUMNS, panel["title"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        taken.update((column, row) for column in columns for row in rows)
        names = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(names)) == len(names), panel["title"]
    assert max(taken.values()) == 1
