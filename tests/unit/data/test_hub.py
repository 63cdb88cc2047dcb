"""Data sets on the Hugging Face Hub: what is downloaded, pinned, found in the cache, and said when that fails."""

import io
import os
import shutil
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import _tree_cache

from penstock import config as configuration
from penstock.errors import DataError, SetupError, UnavailableError
from penstock.runtime.hub import offline
from penstock.telemetry import log
from services.cli import main
from services.launch import launcher
from services.recipe import Recipe
from services.trainer.data.config import DataConfig, MixedSourceConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.sources.files import pin
from services.trainer.data.sources.hub import is_cached
from tests.support.trainer.data.hub_server import COMMIT, OLDER, HubServer, Repo, used_hub

ROOT = Path(__file__).parents[3]


def parquet(*answers: str) -> bytes:
    """A file with a problem for each answer."""
    out = io.BytesIO()
    pq.write_table(pa.table({"problem": ["?"] * len(answers), "answer": list(answers)}), out)
    return out.getvalue()


CARD = b"""---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/*}]
- config_name: hard
  data_files: [{split: train, path: hard/*}, {split: test, path: held_out.jsonl}]
---
"""
REPOS = {
    "owner/plain": Repo(
        commits={
            COMMIT: {
                "data/train-00000-of-00002.parquet": parquet("1", "2"),
                "data/train-00001-of-00002.parquet": parquet("3"),
                "data/test-00000-of-00001.parquet": parquet("9"),
                "README.md": b"no front matter",
                "big.zip": b"0" * 1000,
            },
            OLDER: {"train.jsonl": b'{"problem": "?", "answer": "old"}\n'},
        },
        branches={"main": COMMIT, "v1": OLDER},
    ),
    "owner/with-card": Repo(
        commits={
            COMMIT: {
                "README.md": CARD,
                "easy/a.jsonl": b'{"problem": "?", "answer": "easy"}\n',
                "hard/a.jsonl": b'{"problem": "?", "answer": "hard"}\n',
                "held_out.jsonl": b'{"problem": "?", "answer": "out"}\n',
            }
        }
    ),
    "owner/gated": Repo(commits={}, refusal="GatedRepo"),
    "owner/expired": Repo(commits={}, status=401, message="Invalid credentials in Authorization header"),
    "owner/forbidden": Repo(commits={}, status=403, message="The token lacks a scope"),
    "owner/busy": Repo(commits={}, status=429),
    "owner/down": Repo(commits={}, status=503, message="Service Unavailable"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on this machine, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    with used_hub(REPOS, tmp_path, monkeypatch) as server:
        yield server


def answers(path: str, **settings: Any) -> list[str]:
    """The answers of one epoch, in order."""
    dataset = open_dataset(DataConfig(path=path, shuffle=False, **settings))
    return [dataset[position].golds[0] for position in range(dataset.num_rows)]


def test_a_split_is_downloaded_and_nothing_else(hub: HubServer) -> None:
    """All its shards; neither the held-out files nor the pictures in a zip."""
    assert answers("owner/plain") == ["1", "2", "3"]
    downloaded = {path.rpartition("/")[2] for path in hub.requests if "/resolve/" in path}
    assert downloaded == {"README.md", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"}
    assert answers("owner/plain@[1:]") == ["2", "3"]
    assert answers("owner/plain", split="test") == ["9"]
    assert answers("owner/plain", revision="v1") == ["old"]


def test_the_card_names_configurations_and_splits(hub: HubServer) -> None:
    """As `datasets.load_dataset` reads it."""
    assert answers("owner/with-card", hub_config="easy") == ["easy"]
    assert answers("owner/with-card", hub_config="hard", split="test") == ["out"]
    with pytest.raises(
        DataError, match=r"has no configuration ''; it has easy, hard\. Name one with --data\.hub_config"
    ):
        answers("owner/with-card")


def test_the_commit_is_pinned_into_the_runs_recipe(hub: HubServer, tmp_path: Path) -> None:
    """A run that is resumed or repeated reads the same rows, though the branch has moved."""
    config = DataConfig(sources={"a": MixedSourceConfig(path="owner/plain@[:1]"), "b": MixedSourceConfig()})
    pinned = tomllib.loads(configuration.dump(Recipe(data=pin(config))))["data"]["sources"]
    assert (pinned["a"]["revision"], "revision" in pinned["b"]) == (COMMIT, False)
    assert pin(DataConfig(path="owner/plain", revision="v1")).revision == OLDER
    again = pin(DataConfig(path="owner/plain"))
    hub.repos["owner/plain"] = Repo(commits={**REPOS["owner/plain"].commits}, branches={"main": OLDER})
    assert pin(again) == again
    assert answers("owner/plain", revision=again.revision) == ["1", "2", "3"]
    assert answers("owner/plain") == ["old"]


def test_offline_reads_the_cache_and_asks_nobody(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE: what was fetched before is there, what was not is named with the command that fetches it."""
    answers("owner/plain")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert answers("owner/plain") == ["1", "2", "3"]
    assert pin(DataConfig(path="owner/plain")).revision == COMMIT
    for missing in (
        {"path": "owner/other"},
        {"path": "owner/plain", "revision": "v1"},
        {"path": "owner/plain", "split": "test"},
    ):
        with pytest.raises(
            SetupError, match=r"HF_HUB_OFFLINE is set, and the cache has no complete copy; .*`hf download"
        ):
            answers(**missing)
    with pytest.raises(DataError, match="has no split 'val'; it has test, train"):
        answers("owner/plain", split="val")
    assert hub.requests == []


def test_a_split_is_cached_when_all_its_files_are(hub: HubServer) -> None:
    """Whatever else the data set has, and though its branch has moved; the Hub is not asked."""

    def cached(*, split: str, path: str = "owner/plain", revision: str = "") -> bool:
        return is_cached(path, config="", split=split, revision=revision)

    assert not cached(split="")
    answers("owner/plain")
    hub.repos["owner/plain"] = Repo(commits={**REPOS["owner/plain"].commits}, branches={"main": OLDER})
    hub.requests.clear()
    assert cached(split="")
    assert cached(split="train", revision=COMMIT)
    assert not cached(split="test")
    assert not cached(split="val")
    assert not cached(split="", revision="v1")
    assert not cached(split="", path="owner/other")
    with offline():
        assert answers("owner/plain") == ["1", "2", "3"]
    assert hub.requests == []
    assert answers("owner/plain") == ["old"]


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_a_copy_without_a_list_of_its_files_serves(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    """An earlier huggingface_hub fetched it. If it is incomplete, that is noticed by the numbers of its shards."""
    answers("owner/plain")
    [lists] = (tmp_path / "cache").rglob("trees")
    shutil.rmtree(lists)
    monkeypatch.setattr(_tree_cache, "_IN_MEMORY_TREE_CACHE", {})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert answers("owner/plain", revision=revision) == ["1", "2", "3"]
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert answers("owner/plain", revision=revision) == ["1", "2", "3"]
    [shard] = (tmp_path / "cache").rglob("train-00001-of-00002.parquet")
    shard.unlink()
    with pytest.raises(DataError, match="1 of 2 files of 'data/train' are there"):
        answers("owner/plain", revision=revision)
    assert hub.requests == []


def test_without_a_network_the_cache_serves(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned run starts again on a machine that has lost its connection."""
    answers("owner/plain")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert answers("owner/plain", revision=COMMIT) == ["1", "2", "3"]
        with pytest.raises(UnavailableError, match=r"it cannot be reached, and the cache has no complete copy"):
            answers("owner/with-card")


@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        (
            "owner/nothing",
            {},
            r"neither a file or folder here nor a data set on the .* check the name, and for a private",
        ),
        ("owner/a--b..c", {}, r"neither a file or folder here nor a data set on the"),
        ("owner/gated", {}, r"is gated; accept its terms on its page, then run `hf auth login`"),
        ("owner/expired", {}, r"did not accept HF_TOKEN .*\(401: Invalid credentials in .*\); .*`hf auth login`"),
        ("owner/forbidden", {}, r"did not accept HF_TOKEN .*\(403: The token lacks a scope\); .*`hf auth login`"),
        ("owner/busy", {}, r"refuses further requests for now \(429\); wait some minutes"),
        ("owner/down", {}, r"has a fault of its own \(503: Service Unavailable\); try again later"),
        ("owner/plain", {"revision": "v9"}, r"has no revision 'v9'; give a branch, a tag or a commit"),
        ("owner/plain", {"split": "val"}, r"has no split 'val'; it has test, train"),
        ("owner/plain", {"hub_config": "c"}, r"has no configuration 'c'; its folders are data"),
        ("owner/plain", {"problem_column": "q"}, r"has no column 'q'; it has problem, answer"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_line(
    hub: HubServer, path: str, settings: dict[str, str], words: str
) -> None:
    """With what to do about it."""
    with pytest.raises((DataError, SetupError, UnavailableError), match=words) as caught:
        answers(path, **settings)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    """As on a full disk: trying again does not help."""
    (tmp_path / "cache").write_text("a file, where a folder is needed")
    with pytest.raises(
        SetupError, match=rf"cannot be kept in the cache: .*; make room in {tmp_path}/cache, or set HF_"
    ):
        answers("owner/plain")


@pytest.mark.parametrize("closed", ["cache", "."], ids=["cache", "parent"])
def test_a_cache_that_may_not_be_read_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """As another user's after `hf auth login`, in a container: to fetch what is there would not help."""
    folder = tmp_path / closed
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path) != folder)  # which root may always
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    owner = folder.stat().st_uid
    with pytest.raises(
        SetupError,
        match=rf"user {os.getuid()} may not read the cache in {folder}; run as its owner, user {owner} \(.*=.*`chmod",
    ):
        answers("owner/plain")


def test_train_keeps_the_commit_and_starts_nothing_without_data(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder is made once the data are there; resuming asks the Hub nothing."""

    async def launch(settings: Recipe, *_: object, **__: object) -> None:
        """Nothing: the run is over at once."""

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)
    recipe = [
        str(ROOT / "recipes/tiny-cpu.toml"),
        f"--model.path={ROOT}/models/tiny-qwen3-vl",
        f"--run.dir={tmp_path}/runs",
    ]
    assert main(["train", *recipe, "--data.path=owner/nothing"]) == 2
    assert not (tmp_path / "runs").exists()
    demonstrations = ["--demonstrations.path=owner/with-card", "--demonstrations.hub_config=easy"]
    sets = ["--evaluation.at_end=true", "--evaluation.sets.geometry.pictures=held_out"]
    sets += [f"--evaluation.sets.out.{value}" for value in ("path=owner/with-card", "hub_config=hard", "split=test")]
    assert main(["train", *recipe, "--data.path=owner/plain", *demonstrations, *sets]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    kept = tomllib.loads((folder / "config.toml").read_text())
    for read in (kept["data"], kept["demonstrations"], kept["evaluation"]["sets"]["out"]):
        assert read["revision"] == COMMIT
    hub.repos.clear()
    hub.requests.clear()
    assert main(["train", "--resume", str(folder)]) == 0
    assert hub.requests == []
    assert "check the name, and for a private one" in capsys.readouterr().err
