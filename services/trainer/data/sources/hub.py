"""Data sets on the Hugging Face Hub, through huggingface_hub and its cache.

Invariant: files come from one commit, whose hash is returned. If the Hub cannot be reached, they come from a complete
copy in the cache or not at all. HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE are obeyed.
"""

import glob
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.errors import DataError
from penstock.runtime.hub import endpoint, explained, first_line, is_offline, offline
from services.trainer.data.sources.readers.formats import SUFFIXES
from services.trainer.data.sources.splits import choose_files

log = structlog.get_logger()

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """Files of one commit."""

    files: Sequence[Path]
    revision: str
    """Hash of the commit."""


def is_hub_id(path: str) -> bool:
    """Return whether a path has the form `owner/name` and does not exist on this machine."""
    return _ID.fullmatch(path) is not None and not path.lower().endswith(SUFFIXES) and not Path(path).exists()


def fetch(repo: str, *, config: str, split: str, revision: str) -> HubFiles:
    """Download the files of a split, or find them in the cache.

    Args:
        repo: `owner/name`.
        config: Name of the configuration; empty for the only or the default one.
        split: Name of the split; empty for `train`.
        revision: Branch, tag or commit; empty for the main branch.

    Raises:
        DataError: the data set, revision, configuration or split does not exist or is not open to this account.
        SetupError: the Hub refuses this account, or may not be asked and the cache has no complete copy; or the cache
            cannot be written.
        UnavailableError: the Hub cannot be reached or is busy, and the cache has no complete copy.
    """
    name = f"data.path {repo!r} on the Hugging Face Hub"
    with _explained(repo, revision):
        return _fetch(repo, config=config, split=split, revision=revision, name=name)


def look_up(repo: str, *, revision: str, timeout_s: float) -> None:
    """Ask the Hub for a data set without downloading it.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit; empty for the main branch.
        timeout_s: Timeout of the connection, and of each part of the answer.

    Raises:
        DataError: the data set or revision does not exist or is not open to this account.
        SetupError: the Hub refuses this account, or HF_HUB_OFFLINE forbids it.
        UnavailableError: the Hub cannot be reached, or is busy.
    """
    import huggingface_hub

    with _explained(repo, revision):
        api = huggingface_hub.HfApi(endpoint=endpoint())
        api.dataset_info(repo, revision=revision or None, timeout=timeout_s)


def is_cached(repo: str, *, config: str, split: str, revision: str) -> bool:
    """Return whether the cache has all files of a split, without asking the Hub; see `fetch`."""
    from huggingface_hub import errors

    try:
        with offline():
            found = _fetch(repo, config=config, split=split, revision=revision, name=repo)
    except (DataError, errors.HFValidationError, OSError):  # all others of huggingface_hub are an OSError
        return False
    return all(file.exists() for file in found.files)


def _explained(repo: str, revision: str) -> AbstractContextManager[None]:
    return explained(repo, revision, named=f"data.path {repo!r}", is_data=True, refusal=DataError)


def _fetch(repo: str, *, config: str, split: str, revision: str, name: str) -> HubFiles:
    # This also caches the branch's commit, for use while the Hub is unreachable.
    folder = _download(repo, revision or None, ["README.md"])
    commit = folder.name
    names = _names(repo, folder)
    card = read_card(folder / "README.md")
    wanted = choose_files(names, suffixes=SUFFIXES, config=config, split=split, card=card, name=name)
    files = [folder / each for each in wanted]
    if not all(file.exists() for file in files):
        _download(repo, commit, wanted)
    return HubFiles(files=files, revision=commit)


def _download(repo: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Return the folder of a commit with these of its files, from the cache alone while the Hub is unreachable."""
    import httpx
    import huggingface_hub

    def download(*, only_cached: bool) -> Path:
        path = huggingface_hub.snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            endpoint=endpoint(),
            allow_patterns=[*map(glob.escape, wanted)],
            local_files_only=only_cached,
        )
        return Path(path)

    try:
        return download(only_cached=is_offline())
    except (httpx.ConnectError, httpx.TimeoutException):  # an earlier huggingface_hub cached no list of the files
        return download(only_cached=True)


def _names(repo: str, folder: Path) -> list[str]:
    """Return the paths of a commit's files, from the listing that the download cached."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        tree = huggingface_hub.get_cached_repo_tree(repo, repo_type="dataset", revision=folder.name)
        return [file.path for file in tree]
    except errors.CachedRepoTreeNotFoundError:  # fetched by an earlier huggingface_hub, and the Hub is unreachable
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def read_card(file: Path) -> dict[str, Any]:
    """Return the front matter of a data set's README.md; empty if there is none."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        return (metadata_load(file) or {}) if file.is_file() else {}
    except (ValueError, YAMLError) as error:
        log.warning("data.card_unreadable", file=str(file), reason=first_line(error))
        return {}
