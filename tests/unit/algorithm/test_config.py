"""Section `[algorithm]`: presets, what lies over them, and what is refused."""

from pathlib import Path

import pytest

from penstock.config import Config, dump, load, reference
from penstock.errors import ConfigError
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS
from tests.conftest import ROOT


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
        ("kl.kind=k1", r"k1 in the loss has a gradient of zero on average; take k2, or k1_in_reward"),
        ("kl.kind=k4", r"algorithm\.kl\.kind = 'k4'"),
    ],
)
def test_refuses_what_does_not_exist(override: str, message: str) -> None:
    """One line that names key, value and remedy."""
    with pytest.raises(ConfigError, match=message):
        read(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["anchor=rollout"], r"correction\.kind = 'truncate' with anchor = 'rollout' counts the ratio .* twice; set"),
        (
            ["preset=dppo", "anchor=proximal"],
            r"'dppo_tv' never acts with anchor = 'proximal'.*; set anchor = 'rollout'",
        ),
        (["preset=dppo", "ratio=sequence"], r"'dppo_tv' compares probabilities of tokens; set ratio = 'token'"),
        (
            ["preset=gspo", "aggregation.kind=token"],
            r"'sequence' with aggregation\.kind = 'token' would weigh .* length",
        ),
        (["kl.kind=k1_in_reward"], r"kl\.kind = 'k1_in_reward' gives each token a reward .* 'grpo' compares samples"),
        (["advantage.kind=reinforce_pp", "advantage.norm=batch"], r"reinforce_pp whitens over the batch already"),
        (["advantage.kind=custom"], r"algorithm\.advantage: kind = 'custom' needs function = 'module:function'"),
        (["trust_region.kind=custom", "trust_region.function=gmpo"], r"needs function = .*, found 'gmpo'"),
        (["advantage.kind=maxrl", "advantage.length_penalty.kind=linear"], r"maxrl needs rewards of at least 0"),
        (
            ["advantage.kind=grpo", "advantage.length_penalty.kind=linear"],
            r"cancels length_penalty\.length_factor .* set kind = 'dr_grpo' or 'rloo'",
        ),
        (["advantage.length_penalty.kind=soft_overlong"], r"needs 0 < buffer_tokens <= max_tokens, found 0 and 0"),
        (["preset=ppo", "trust_region.dual=1.1"], r"dual = 1\.1 must be 0 or above 1 \+ clip_high = 1\.2"),
        (["preset=cispo", "trust_region.ratio_low=6"], r"ratio_low = 6\.0 must be below ratio_high = 5\.0"),
        (["preset=icepop", "correction.low=7"], r"low = 7\.0 must be below high = 5\.0"),
        (
            ["preset=icepop", "correction.low=1.5"],
            r"'mask' with low = 1\.5 and high = 5\.0 leaves out every token .*; set low <= 1 <= high",
        ),
        (["correction.veto_low=1.5"], r"veto_low = 1\.5 .* leave out every sample .*; set veto_low < 1 < veto_high"),
        (["correction.veto_high=0.5"], r"veto_high = 0\.5 leave out every sample"),
        (
            ["preset=gspo", "anchor=log_linear", "correction.kind=truncate"],
            r"level = 'token' with ratio = 'sequence' .* unequally; set correction\.level = 'sequence'",
        ),
        (["preset=gspo", "rejection.kind=m2po"], r"'m2po' with ratio = 'sequence' would leave out single tokens"),
        (["aggregation.kind=constant"], r"constant needs a length in tokens"),
        (["trust_region.clip_high=0.3"], r"clip_high = 0\.3 has no effect with kind = 'none'; it is for clip"),
        (["correction.low=0.5"], r"low = 0\.5 has no effect with kind = 'truncate'; it is for mask or clip"),
        (
            ["entropy.kind=bonus", "entropy.coef=0"],
            r"algorithm\.entropy: coef = 0\.0 with kind = 'bonus' is no bonus; set coef above 0, or kind = 'none'",
        ),
        (["entropy.target=1.5"], r"target = 1\.5 has no effect with kind = 'none'; it is for target"),
        (
            ["kl.kind=k2", "kl.ema_weight=0.5"],
            r"ema_weight = 0\.5 has no effect with refresh = 'never'; it is for 'ema'",
        ),
        (["kl.kind=k2", "kl.refresh_every=2"], r"refresh_every = 2 has no effect with refresh = 'never'"),
        (["kl.refresh=ema"], r"algorithm\.kl: refresh = ema has no effect with kind = 'none'"),
        (["advantage.function=a:b"], r"function = a:b has no effect with kind = 'grpo'; it is for custom"),
    ],
)
def test_refuses_what_contradicts_itself(overrides: list[str], message: str) -> None:
    """With the reason, and what to set instead."""
    with pytest.raises(ConfigError, match=message):
        read(*overrides)


def test_every_setting_is_explained() -> None:
    """Field docstrings are the help of `penstock config --help-settings algorithm`."""
    for section in reference.sections(File):
        assert section.help
        assert [setting.name for setting in section.settings if not setting.help] == []


def test_docs_name_every_preset_and_every_kind() -> None:
    """docs/training/algorithms.md has a row for each."""
    text = (ROOT / "docs" / "training" / "algorithms.md").read_text()
    kinds = {value for section in reference.sections(File) for value in choices_of(section)}
    assert {"gspo", "k3_plus", "m2po", "soft_overlong"} <= kinds
    assert {kind for kind in kinds if f"`{kind}`" not in text and f'"{kind}"' not in text} == set()


def choices_of(section: reference.Section) -> set[str]:
    """The names that a section's settings choose from."""
    return {
        name for setting in section.settings if setting.kind.startswith('"') for name in setting.kind.split('"')[1::2]
    }
