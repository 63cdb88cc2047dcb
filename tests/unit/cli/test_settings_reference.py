"""The settings' reference and the recipes' schema say what the models say."""

import json
import re
import tomllib
from pathlib import Path
from typing import Literal

import jsonschema
import pydantic
import pytest

from penstock.config import Config, load
from penstock.config.reference import Section, Setting, as_markdown, as_text, sections
from services.launch.settings import service_settings
from services.recipe import Recipe
from tools.generate_settings import contents

ROOT = Path(__file__).parents[3]
RECIPES = sorted([*(ROOT / "recipes").glob("*.toml"), *(ROOT / "examples").glob("*/recipe.toml")])
SCHEMA = Path("recipes/recipe.schema.json")
VALUES = Path("deploy/helm/values.schema.json")


class Inner(Config):
    """An inner section."""

    rate: float | None = pydantic.Field(default=None, gt=0, le=1)
    """A share | of <something>
    on two lines."""


class Outer(Config):
    """A section."""

    kind: Literal["a", "b"] = "a"
    """One of two."""
    names: tuple[str, ...] = ("x", "y")
    """Names."""
    where: Path
    """A place."""
    inner: Inner = Inner()
    """Its section."""
    table: dict[str, Inner] = pydantic.Field(default_factory=dict)
    """Sections by name."""


class File(Config):
    """A whole file."""

    outer: Outer | None = None


def test_a_number_s_default_is_shown_as_a_number() -> None:
    """Not as the text by which TOML keeps all its digits."""
    reward = next(section for section in sections(Recipe) if section.key == "reward")
    assert next(setting.default for setting in reward.settings if setting.name == "geo3k_tolerance") == "0.05"


def test_settings_are_described_as_their_models_define_them() -> None:
    """Type with its range, default as TOML, the docstring on one line; sections inside and in tables."""
    outer, inner, named = sections(File)
    assert (outer.key, inner.key, named.key) == ("outer", "outer.inner", "outer.table.<name>")
    assert outer.help == "A section."
    assert outer.settings == [
        Setting(name="kind", kind='"a" or "b"', default='"a"', help="One of two."),
        Setting(name="names", kind="list of text", default='["x", "y"]', help="Names."),
        Setting(name="where", kind="path", default="required", help="A place."),
    ]
    rate = Setting(
        name="rate", kind="number, > 0, <= 1", default="unset", help="A share | of <something> on two lines."
    )
    assert inner.settings == named.settings == [rate]


def test_a_description_is_text_or_markdown() -> None:
    """For a terminal, and as a table in which nothing breaks a cell."""
    rate = Setting(name="rate", kind="number", default="unset", help="A | of <b>")
    described = [Section(key="a.b", help="Help.", settings=[rate])]
    assert as_text(described) == "[a.b]\n  Help.\n\n  rate = unset\n      number\n      A | of <b>\n"
    assert "| `rate` | number | `unset` | A \\| of \\<b> |" in as_markdown(described).splitlines()


def test_every_setting_is_explained() -> None:
    """Field docstrings are the help text, so none may be missing."""
    missing = [
        f"{section.key}.{setting.name}"
        for section in sections(Recipe)
        for setting in section.settings
        if not setting.help
    ]
    assert missing == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recipe_fits_the_schema(path: Path) -> None:
    """And names it in its first line, where editors look."""
    text = path.read_text()
    [named] = re.findall(r"\A#:schema (\S+)\n", text)
    assert (path.parent / named).resolve() == ROOT / SCHEMA
    jsonschema.validate(tomllib.loads(text), json.loads(contents()[SCHEMA]))


def test_the_generated_files_are_current() -> None:
    """docs/settings.md and the schemas say what the settings are now; `make settings` writes them."""
    assert contents().keys() == {Path("docs/settings.md"), SCHEMA, VALUES}
    assert [str(path) for path, text in contents().items() if (ROOT / path).read_text() != text] == []


def test_services_by_hand_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """recipes/local-services.toml over any recipe gives a worker the addresses at which the others listen."""
    monkeypatch.chdir(ROOT)
    recipe = load(Recipe, [ROOT / "recipes/tiny-cpu.toml", ROOT / "recipes/local-services.toml"])
    settings = service_settings.for_worker(recipe)
    assert settings.router_address == f"127.0.0.1:{recipe.router.port}" != "127.0.0.1:0"
    assert settings.reward_address == f"127.0.0.1:{recipe.reward.port}" != "127.0.0.1:0"
    assert recipe.bus.url.startswith("nats://127.0.0.1:")


def test_the_schema_refuses_what_a_recipe_must_not_hold() -> None:
    """Unknown keys and values out of range."""
    schema = json.loads(contents()[SCHEMA])
    for wrong in ({"trainer": {"num_stepz": 1}}, {"trainer": {"num_steps": 0}}, {"log": {"level": "loud"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_chart_s_lists_of_settings_take_every_setting_and_no_other() -> None:
    """A section may be given as a whole; names that a person chooses are free, and so are the keys of plain tables."""
    values = json.loads(contents()[VALUES])
    validator = jsonschema.Draft7Validator({"$ref": "#/definitions/settings", "definitions": values["definitions"]})
    described = list(sections(Recipe))
    names = [f"{section.key}.{setting.name}=1" for section in described for setting in section.settings]
    whole = [f"{section.key}={{}}" for section in described if "." in section.key]
    chosen = [
        "rollout.sglang.any_name=1",
        "worker.environments.mine=m:C",
        "data.sources={}",
        "reward.verifiers.a-b=f:g",
        "trainer.optimizer.learning_rates.*bias=0",
        "worker.environments.mine/2.class=m:C",
    ]
    for given in [*(name.replace("<name>", "mine") for name in (*names, *whole)), *chosen]:
        assert validator.is_valid([given]), given
    for given, known in {
        "trainer.num_stepz=5": "(num_steps|",
        "trainer.weight_sync.transprot=disk": "(mode|transport|",
        "trainer.num_steps.x=1": "(num_steps|",
        "data.sources.mine.pathh=x": "(path|",
        "worker.environments.mine.klass=m:C": "(class|",
        "trianer.num_steps=5": "(model|run|",
        "trainer=5": "(model|run|",
    }.items():
        (error,) = validator.iter_errors(["trainer.num_steps=1", given])
        assert (list(error.path), error.instance, known in error.message) == ([1], given, True)
