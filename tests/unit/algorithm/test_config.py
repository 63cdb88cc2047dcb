"""Section `[algorithm]`: presets, what lies over them, and what is refused."""

from pathlib import Path

import pytest

from penstock.config import Config, dump, load
from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS


class File(Config):
    """A recipe with this section only."""

    algorithm: AlgorithmConfig = AlgorithmConfig()


def read(*overrides: str, recipes: tuple[Path, ...] = ()) -> AlgorithmConfig:
    """The section as a recipe and overrides give it."""
    return load(File, recipes, [f"--algorithm.{override}" for override in overrides]).algorithm


def write(path: Path, text: str) -> Path:
    """A recipe."""
    path.write_text(text)
    return path


def test_the_default_is_truncated_importance_sampling() -> None:
    """As a recipe without the section."""
    config = AlgorithmConfig()
    assert config == read() == read("preset=tis")
    assert (config.anchor, config.correction.kind, config.correction.high) == ("proximal", "truncate", 2.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_and_survives_being_written(preset: str, tmp_path: Path) -> None:
    """A recorded step holds every value, and reads back to the same."""
    config = read(f"preset={preset}")
    assert config.preset == preset
    assert read(recipes=(write(tmp_path / "r.toml", dump(File(algorithm=config))),)) == config


def test_a_value_lies_over_the_preset() -> None:
    """And leaves the other values of its section alone."""
    config = read("preset=ppo", "trust_region.clip_high=0.3")
    assert (config.trust_region.kind, config.trust_region.clip_low, config.trust_region.clip_high) == ("clip", 0.2, 0.3)


def test_a_section_of_another_kind_takes_nothing_from_the_preset() -> None:
    """A bound of one kind has another meaning in another."""
    assert read("preset=tis", "correction.kind=none").correction.kind == "none"


def test_a_preset_replaces_what_earlier_layers_said(tmp_path: Path) -> None:
    """Of the whole section, whatever the order on the command line; a later value still lies over it."""
    base = write(tmp_path / "base.toml", dump(File(algorithm=read("preset=tis", "correction.high=7"))))
    assert read("preset=ppo", recipes=(base,)) == read("preset=ppo")
    assert read("trust_region.clip_high=0.5", "preset=ppo", recipes=(base,)).trust_region.clip_high == 0.5
    overlay = write(tmp_path / "overlay.toml", '[algorithm]\npreset = "tis"\n')
    assert read(recipes=(base, overlay)).correction.high == 2.0


def test_a_kind_replaces_the_values_beside_it(tmp_path: Path) -> None:
    """A recorded step holds every value; another kind begins with its defaults."""
    base = write(tmp_path / "base.toml", dump(File(algorithm=read("correction.high=7"))))
    assert read("correction.kind=truncate", recipes=(base,)).correction.high == 2.0
    assert read("correction.high=3", "correction.kind=truncate", recipes=(base,)).correction.high == 3.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("preset=gpro", r"algorithm\.preset = 'gpro'"),
        ("trust_region.clip=0.2", r"unknown key algorithm\.trust_region\.clip; did you mean .*clip_"),
        ("correction.high=0", r"algorithm\.correction\.high = '0'"),
    ],
)
def test_refuses_what_does_not_exist(override: str, message: str) -> None:
    """One line that names key, value and remedy."""
    with pytest.raises(ConfigError, match=message):
        read(override)
