"""Models on the Hugging Face Hub, through huggingface_hub and its cache.

    Qwen/Qwen3-VL-2B-Instruct    Qwen/Qwen3-VL-2B-Instruct@main    Qwen/Qwen3-VL-2B-Instruct@<commit>

Invariant: a model's files come from one commit. If the Hub cannot be reached, they come from a complete copy in the
cache or not at all. HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE are obeyed.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import ConfigError, SetupError, UnavailableError
from penstock.model.parameters import has_all_files
from penstock.runtime.hub import endpoint, explained, is_offline

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS: Final = "*.safetensors"
_OTHER_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model")
"""Configuration, tokenizer, processor and chat template."""
_IN_FOLDERS: Final = "*/*"
"""Other formats of the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelId:
    """A model on the Hub."""

    repo: str
    """`owner/name`."""
    revision: str
    """Branch, tag or commit; empty for the main branch."""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the Hub says about a model."""

    num_parameters: int
    """0 if it does not say."""
    checkpoint_bytes: int
    model_type: str = ""
    """Empty if it does not say."""


def parse_id(path: Path) -> ModelId | None:
    """Return the model that a path names, if it has the form `owner/name[@revision]` and is not on this machine."""
    match = _ID.fullmatch(str(path))
    if match is None or path.exists():
        return None
    return ModelId(repo=match["repo"], revision=match["revision"] or "")


def fetch(path: Path, *, setting: str = "model.path", with_weights: bool = True) -> Path:
    """Return the folder of the model that a path names, after downloading the files that the cache lacks.

    Args:
        path: A path is returned as it is; a model on the Hub becomes the folder of its commit in the cache.
        setting: The setting or option with the path, for errors.
        with_weights: Whether the weights are needed too.

    Raises:
        ConfigError: the model or revision does not exist or is not open to this account.
        SetupError: the Hub refuses this account, or may not be asked and the cache has no complete copy; the cache
            cannot be written; or huggingface_hub is not installed.
        UnavailableError: the Hub cannot be reached or is busy, and the cache has no complete copy.
    """
    model = parse_id(path)
    if model is None:
        return path
    with _explained(model, setting):
        return _snapshot(model, with_weights=with_weights, only_cached=is_offline())


def find_cached(path: Path) -> Path | None:
    """Return the folder of the model that a path names if this machine has all its files, without asking the Hub."""
    model = parse_id(path)
    if model is None:
        return path
    try:
        with _explained(model, "model.path"):
            return _snapshot(model, with_weights=True, only_cached=True)
    except (ConfigError, SetupError, UnavailableError):
        return None


def look_up(model: ModelId, *, setting: str = "model.path", timeout_s: float) -> ModelFacts:
    """Ask the Hub for a model without downloading it.

    Args:
        model: The model.
        setting: The setting that names it, for errors.
        timeout_s: Timeout of the connection, and of each part of the answer.

    Raises:
        ConfigError: the model or revision does not exist or is not open to this account.
        SetupError: the Hub refuses this account, or HF_HUB_OFFLINE forbids it; or huggingface_hub is not installed.
        UnavailableError: the Hub cannot be reached, or is busy.
    """
    with _explained(model, setting):
        import huggingface_hub

        api = huggingface_hub.HfApi(endpoint=endpoint())
        found = api.model_info(model.repo, revision=model.revision or None, timeout=timeout_s, files_metadata=True)
    files = {each.rfilename: each.size or 0 for each in found.siblings or ()}
    return ModelFacts(
        num_parameters=found.safetensors.total if found.safetensors is not None else 0,
        checkpoint_bytes=sum(size for name, size in files.items() if "/" not in name and name.endswith(".safetensors")),
        model_type=(found.config or {}).get("model_type", ""),
    )


def name_snapshot(folder: Path) -> str | None:
    """Return `owner/name@commit` for a folder that `fetch` returned, which every machine understands; else None."""
    snapshots, repo = folder.parent, folder.parent.parent
    kind, *names = repo.name.split("--")
    if snapshots.name != "snapshots" or kind != "models" or len(names) != 2 or not _COMMIT.fullmatch(folder.name):
        return None
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return None
    if repo.parent != Path(constants.HF_HUB_CACHE).expanduser().resolve():
        return None
    return f"{'/'.join(names)}@{folder.name}"


def _snapshot(model: ModelId, *, with_weights: bool, only_cached: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = huggingface_hub.snapshot_download(
        model.repo,
        revision=model.revision or None,
        endpoint=endpoint(),
        allow_patterns=[*_OTHER_FILES, *([_WEIGHTS] if with_weights else [])],
        ignore_patterns=_IN_FOLDERS,
        local_files_only=only_cached,
    )
    if with_weights and not has_all_files(Path(folder)):  # of a download that ended early, when the Hub is not asked
        raise LocalEntryNotFoundError(f"{folder} lacks files of its index")
    return Path(folder)


@contextmanager
def _explained(model: ModelId, setting: str) -> Iterator[None]:
    """Translate errors of huggingface_hub, which not every installation has, into errors with a remedy."""
    named = f"{setting} = {str(model)!r}"
    try:
        import huggingface_hub  # noqa: F401 - it is missing here, if at all
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{named} on the Hugging Face Hub needs the Python package {error.name!r}, which is not installed; "
            "`pip install 'penstock[trainer]'`, or give a folder"
        ) from None
    with explained(model.repo, model.revision, named=named, is_data=False, refusal=ConfigError):
        yield
