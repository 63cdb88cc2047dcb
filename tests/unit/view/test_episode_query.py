"""Filtering and sorting kept groups."""

from typing import Any

import pytest

from penstock.errors import InvalidRequestError
from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.episode_query import EpisodeQuery
from services.view.run_reader import RunReader
from tests.support.view_runs import add_group


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four groups that differ in everything that can be asked for."""
    folder = tmp_path_factory.mktemp("run")
    files = EpisodeFiles(folder / "episodes", last_step=0, max_bytes=1e9)
    add_group(files, step=1, index=0, rewards=(1.0, 1.0), dlogp=1e-6, text="A square")
    add_group(files, step=1, index=7, rewards=(1.0, 0.0), dlogp=1e-2, prompt="What is the AREA?", num_tokens=9)
    add_group(files, step=2, index=3, rewards=(None, None), outcome="failed", reason="the environment broke")
    add_group(files, step=3, index=4, rewards=(0.0, 0.0), dlogp=1e-4, outcome="stale", reason="2 versions old")
    return RunReader(folder).episodes()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, [3, 2, 1, 0]),
        ({"descending": False}, [0, 1, 2, 3]),
        ({"outcome": "stale"}, [3]),
        ({"step": 1}, [1, 0]),
        ({"row": "/0"}, [1, 0]),
        ({"finish": "length"}, []),
        ({"text": "square a"}, [0]),
        ({"text": "area"}, [1]),
        ({"text": "environment BROKE"}, [2]),
        ({"sort": "reward"}, [0, 1, 3, 2]),
        ({"sort": "reward", "descending": False}, [3, 1, 0, 2]),
        ({"sort": "dlogp"}, [1, 0, 2, 3]),
        ({"sort": "spread"}, [1, 3, 0, 2]),
        ({"sort": "tokens", "outcome": "trained"}, [1, 0]),
    ],
)
def test_groups_are_found(index: list[dict[str, Any]], asked: dict[str, Any], found: list[int]) -> None:
    """What has no number to sort by comes last."""
    assert EpisodeQuery(**asked).run(index) == found


def test_an_unknown_order_is_refused(index: list[dict[str, Any]]) -> None:
    """With those that there are."""
    with pytest.raises(InvalidRequestError, match="sort = 'size' must be one of step, index, reward"):
        EpisodeQuery(sort="size").run(index)
