"""The Helm chart knows which settings several processes read, so that it can refuse them in the list of one."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from services.cli import serve
from services.launch.settings import service_settings

TEMPLATE = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "templates" / "_pod.tpl"
READERS = (
    service_settings.for_reward,
    service_settings.for_router,
    service_settings.for_engine,
    service_settings.for_worker,
    service_settings.for_trainer,
    serve.serve,  # of every process
)
OWN = {"metrics", "model", "model.path", "network", "run", "run.dir", "run.folder", "reward.port", "router.port"}
"""May differ between processes, such as the folder of the model; the chart gives workers the addresses for which they
would need the ports."""


def test_the_chart_lists_the_settings_that_several_processes_read() -> None:
    """Sections and single settings, as `services/cli` hands them out."""
    (listed,) = re.findall(r'define "penstock.shared" -}}\n(.*?){{- end', TEMPLATE.read_text(), re.DOTALL)
    read = [read_by(each) for each in READERS]
    shared = {
        key
        for own in read
        for others in read
        if others is not own
        for key in own
        if any(key == other or is_part(key, other) for other in others)
    }
    assert shared >= OWN
    alike = shared - OWN
    whole = {key for key in alike if not any(is_part(key, section) for section in alike)}
    assert sorted(yaml.safe_load(listed)) == sorted(whole)


def is_part(key: str, section: str) -> bool:
    """Whether the setting, or section, is in the section."""
    return key.startswith(f"{section}.")


def read_by(reader: Callable[..., Any]) -> set[str]:
    """The parts of a recipe that a function names."""
    source = inspect.getsource(reader).replace("_model(recipe)", "recipe.model")
    return {*re.findall(r"\brecipe\.([a-z0-9_]+(?:\.[a-z0-9_]+)*)\b(?!\()", source)}
