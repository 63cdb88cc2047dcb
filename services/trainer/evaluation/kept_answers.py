"""Answers of an interrupted evaluation that count when it resumes.

    evaluations/step-000020/sets.json    the settings of each set with which samples.jsonl is played

Invariant: all answers of a set in samples.jsonl were played with the settings in sets.json, because the file is
replaced after answers with other settings are removed and before new ones are added.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from penstock.runtime.files import write_atomically
from services.trainer.evaluation.config import EvaluationSetConfig
from services.trainer.evaluation.outcome import PlayedPrompt
from services.trainer.evaluation.report import SAMPLES_FILE, read_samples
from services.trainer.evaluation.sets import EvaluationSet

log = structlog.get_logger()

SETS_FILE: Final = "sets.json"
CHANGES_NO_ANSWER: Final[set[str]] = {"num_prompts", "pass_score"}
"""Settings of a set that may change between an interruption and the resumption."""


def write_set_settings(folder: Path, sets: Mapping[str, EvaluationSet]) -> None:
    """Write the settings of the evaluation in `folder`; the file is complete or absent. Blocking."""
    settings = {name: _settings_of(each.config) for name, each in sets.items()}
    write_atomically(folder / SETS_FILE, json.dumps(settings, indent=2) + "\n")


def read_kept_answers(folder: Path, sets: Mapping[str, EvaluationSet], *, version: int | None) -> list[PlayedPrompt]:
    """Return the answers of `version` to rows of `sets` that were played with the sets' current settings. Blocking.

    Discarded answers are logged, except rows that failed. Of a row that two trainers played, since one was frozen while
    the other took its place, the last answer counts. Reward profiles are compared only by name.

    Args:
        folder: Folder of the evaluation.
        sets: Sets to play.
        version: The policy version that plays; None for an API, which has none.
    """
    played_with = _read_settings(folder / SETS_FILE)
    versions = None if version is None else (version, version)
    answers = [each for each in read_samples(folder / SAMPLES_FILE) if not each.error and each.versions == versions]
    kept: list[PlayedPrompt] = []
    for name in sorted({each.set_name for each in answers}):
        of_set = [each for each in answers if each.set_name == name]
        before = played_with.get(name)
        now = _settings_of(sets[name].config) if name in sets else None
        if now is None or before != now:
            log.warning(
                "evaluation.answers_discarded",
                set_name=name,
                version=version,
                num_prompts=len(of_set),
                reason="the recipe no longer has the set" if now is None else "the set's settings have changed",
                settings=_differing(before or {}, now or {}),
            )
        else:
            kept += {each.row: each for each in of_set if each.row < len(sets[name])}.values()
    return kept


def _settings_of(config: EvaluationSetConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=CHANGES_NO_ANSWER)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings by set; empty if the file is absent or unreadable."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
