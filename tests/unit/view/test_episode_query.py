"""Filtering and sorting kept groups."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequestError
from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.view.episode_query import EpisodeQuery, Found
from services.view.export.group_choice import order_of_groups
from services.view.run_reader import RunReader
from services.view.text_search import TextSearch
from tests.support.view_runs import add_group


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    """Four groups that differ in everything that can be asked for."""
    folder = tmp_path_factory.mktemp("run")
    files = EpisodeFiles(folder / "episodes", last_step=0, max_bytes=1e9)
    add_group(files, step=1, index=0, rewards=(1.0, 1.0), dlogp=1e-6, text="A square")
    add_group(files, step=1, index=7, rewards=(1.0, 0.0), dlogp=1e-2, prompt="What is the AREA?", num_tokens=9)
    add_group(files, step=2, index=3, rewards=(None, None), outcome="failed", reason="the environment broke")
    add_group(files, step=3, index=4, rewards=(0.0, 0.0), dlogp=1e-4, outcome="stale", reason="2 versions old")
    return RunReader(folder)


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
        ({"sort": "lowest", "descending": False}, [3, 1, 0, 2]),
        ({"sort": "lowest"}, [0, 1, 3, 2]),
        ({"sort": "dlogp"}, [1, 0, 2, 3]),
        ({"sort": "spread"}, [1, 3, 0, 2]),
        ({"sort": "tokens", "outcome": "trained"}, [1, 0]),
    ],
)
def test_groups_are_found(run: RunReader, asked: dict[str, Any], found: list[int]) -> None:
    """What has no number to sort by comes last."""
    assert run.find_episodes(EpisodeQuery(**asked))[1] == Found(places=found)


def test_the_worst_sample_is_found_in_a_group_of_a_good_mean(tmp_path: Path) -> None:
    """Of groups whose worst samples are equal, the one with the lower mean comes first."""
    files = EpisodeFiles(tmp_path / "episodes", last_step=0, max_bytes=1e9)
    for index, rewards in enumerate([(0.4, 0.4), (1.0, 0.0, 1.0), (0.25, None), (1.0, 0.0, 0.5), (None,)]):
        add_group(files, step=100, index=index, rewards=rewards)
    run = RunReader(tmp_path)
    worst = EpisodeQuery(step=100, sort="lowest", descending=False)
    assert run.find_episodes(worst)[1].places == [3, 1, 2, 0, 4]
    assert list(order_of_groups(run.episodes()))[1] == 3


def test_an_unknown_order_is_refused(run: RunReader) -> None:
    """With those that there are."""
    with pytest.raises(InvalidRequestError, match="sort = 'size' must be one of step, index, reward"):
        run.find_episodes(EpisodeQuery(sort="size"))


@pytest.fixture
def long_run(tmp_path: Path) -> RunReader:
    """Four groups whose answers are longer than what the index has of them."""
    files = EpisodeFiles(tmp_path / "episodes", last_step=0, max_bytes=1e9)
    for step in range(1, 5):
        add_group(files, step=step, index=step, text=f"{'so ' * 500}in the END number-{step}")
    return RunReader(tmp_path)


def test_the_end_of_a_long_answer_is_found(long_run: RunReader) -> None:
    """Beside words that the index has, also of a group whose step is written on; not of one that was deleted."""
    assert "END" not in str(long_run.episodes())
    for text, found in (("end", [3, 2, 1, 0]), ("CORNERS number-3", [2]), ("number-5", []), ("so end", [3, 2, 1, 0])):
        assert long_run.find_episodes(EpisodeQuery(text=text))[1].places == found
    (long_run.folder / "episodes" / "step-000002.jsonl").unlink()
    assert RunReader(long_run.folder).find_episodes(EpisodeQuery(text="end"))[1].places == [3, 2, 0]


def test_a_search_that_takes_long_is_cut_and_goes_on(long_run: RunReader) -> None:
    """It says what it has not read yet. What it has read it does not read again, until a resumed run replaces it."""
    read: list[int] = []

    def description(entry: Mapping[str, Any]) -> bytes | None:
        read.append(entry["number"])
        return long_run.episode(entry["number"])

    index, search = long_run.episodes(), TextSearch(description)
    query = EpisodeQuery(text="end")
    found = [query.run(index, partial(search.run, budget_s=0.0)) for _ in range(5)]
    assert [each.num_unsearched for each in found] == [3, 2, 1, 0, 0]
    assert [each.places for each in found] == [[3], [3, 2], [3, 2, 1], [3, 2, 1, 0], [3, 2, 1, 0]]
    assert read == [3, 2, 1, 0]
    query.run([*index[:3], index[3] | {"time": "later"}], search.run)
    assert read == [3, 2, 1, 0, 3]


def test_filters_without_words_read_no_description(long_run: RunReader) -> None:
    """Nor does a search that the index answers."""

    def refuse(entry: Mapping[str, Any]) -> bytes | None:
        raise AssertionError(f"it read group {entry['number']}")

    index, search = long_run.episodes(), TextSearch(refuse)
    for asked in ({"step": 3}, {"outcome": "trained", "sort": "dlogp"}, {"text": "corners"}):
        assert EpisodeQuery(**asked).run(index, search.run).places
