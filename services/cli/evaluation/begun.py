"""The initial state of an evaluation, kept in its run folder, so that `--resume` continues under equal conditions.

    runs/<name>-eval-<start>/begun.json

Invariant: all answers in the folder's samples.jsonl come from one model, one recipe and one version of Penstock.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.errors import ConfigError
from penstock.model import hub
from penstock.runtime.files import write_atomically
from services.recipe import Recipe
from services.trainer.evaluation.config import EvaluationSetConfig
from services.trainer.evaluation.kept_answers import CHANGES_NO_ANSWER
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.sets import EvaluationSet

BEGUN_FILE: Final = "begun.json"

_ANSWERING_SECTIONS: Final = ("model", "sampling", "rollout", "worker", "reward")
"""Sections, besides the sets, whose settings may change answers or verdicts."""
_CHANGES_ONLY_SPEED: Final = frozenset(
    f"{section}.{name}"
    for section, names in {
        "rollout": (
            "replicas prefill decode role port transfer_backend pair_deadline_s max_running max_total_tokens "
            "gpu_memory_fraction"
        ),
        "worker": "num concurrency environment_processes port router_address router_url reward_address",
        "reward": "port http_port http_profile http_max_body_mb workers sandbox recycle_after remote.max_concurrency",
    }.items()
    for name in names.split()
)
_MAX_LISTED: Final = 5
"""The most names in a message."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The model or API that plays an evaluation."""

    started_at: str
    """Start time in ISO form."""
    model: str
    """Folder of the model, or the API's model and where it is."""
    url: str = ""
    """URL of the API; empty: engines play."""
    url_model: str = ""
    """The API's name of the model."""
    files: dict[str, tuple[int, int]] = {}
    """Size and modification time in ns of each file in the model's folder."""
    penstock: str = msgspec.field(default_factory=lambda: installed_version("penstock"))

    @classmethod
    def with_engines(cls, model: Path, started_at: str) -> "Begun":
        """Return the state of an evaluation with the model in a folder."""
        return cls(started_at=started_at, model=str(model), files=_files(model))

    @property
    def model_name(self) -> str:
        """The model's name in results: of one on the Hugging Face Hub, its id and commit."""
        return hub.name_snapshot(Path(self.model)) or self.model

    def write(self, folder: Path) -> None:
        """Write begun.json; it is complete or absent."""
        write_atomically(folder / BEGUN_FILE, msgspec.json.encode(self))


def read_begun(folder: Path) -> Begun:
    """Return the state with which the evaluation in `folder` was begun.

    Raises:
        ConfigError: the folder has no evaluation that can be resumed.
    """
    try:
        return msgspec.json.decode((folder / BEGUN_FILE).read_bytes(), type=Begun)
    except (OSError, msgspec.MsgspecError):
        raise ConfigError(
            f"--resume {folder}: no `penstock eval` has begun to play in it ({BEGUN_FILE} is missing or damaged); "
            "begin one, penstock eval RECIPE"
        ) from None


def require_same(begun: Begun, folder: Path, *, before: Recipe, now: Recipe) -> None:
    """Check that an evaluation can be resumed.

    Args:
        begun: The state with which it was begun.
        folder: The evaluation's run folder.
        before: The recipe with which it was begun.
        now: The same recipe with the overrides of this start.

    Raises:
        ConfigError: a setting, the model or Penstock has changed, so that answers of both starts are not comparable.
    """
    if changed := sorted(_differing(_answering(before), _answering(now))):
        raise ConfigError(
            f"--resume {folder}: {_listed(changed)} {'differs' if len(changed) == 1 else 'differ'} from the settings "
            "with which its answers were played; leave the override out, or begin a new evaluation"
        )
    if (installed := installed_version("penstock")) != begun.penstock:
        raise ConfigError(
            f"--resume {folder}: it was begun with Penstock {begun.penstock}, and this is {installed}; install "
            f"penstock=={begun.penstock}, or begin a new evaluation"
        )
    if not begun.url and (changed := sorted(_differing(begun.files, _files(Path(begun.model))))):
        raise ConfigError(
            f"--resume {folder}: the model {begun.model} has changed since it was begun ({_listed(changed)}); "
            "begin a new evaluation"
        )


def require_same_rows(folder: Path, sets: Mapping[str, EvaluationSet], answers: list[PlayedPrompt]) -> None:
    """Check that the answered rows have not changed.

    Raises:
        ConfigError: a row's prompt, images, answer or terms have changed.
        DataError: a row is wrong.
    """
    for answer in answers:
        played = sets[answer.set_name]
        row = played.described(answer.row, played[answer.row])
        asked = msgspec.structs.replace(answer, samples=(), versions=None)
        if not answer.terms:
            row = msgspec.structs.replace(row, terms="")
        if msgspec.json.encode(asked) != msgspec.json.encode(row):
            raise ConfigError(
                f"--resume {folder}: row {answer.row} of evaluation.sets.{answer.set_name} is not the one that was "
                "answered; bring the data back, or begin a new evaluation"
            )


def _answering(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that may change answers or verdicts, by dotted key."""
    settings = recipe.model_dump(mode="json")
    found = {
        key: value
        for section in _ANSWERING_SECTIONS
        for key, value in _leaves(section, settings[section])
        if key not in _CHANGES_ONLY_SPEED
    }
    found["trainer.float32_head"] = recipe.trainer.float32_head  # engines compute their output head like the trainer
    for name, each in recipe.evaluation.sets.items():
        found |= {f"evaluation.sets.{name}.{key}": value for key, value in _of_set(each)}
    return found


def _of_set(config: EvaluationSetConfig) -> Iterator[tuple[str, Any]]:
    yield from config.model_dump(mode="json", exclude=CHANGES_NO_ANSWER).items()


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    absent = object()
    return {key for key in before.keys() | now.keys() if before.get(key, absent) != now.get(key, absent)}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more}"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    states = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}
