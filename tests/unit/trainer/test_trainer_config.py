"""The trainer's settings: ranges, and what is said about a value outside them."""

from pathlib import Path

import pytest

from penstock.config import Config, SamplingConfig, load
from penstock.documented import field_docstrings
from penstock.errors import ConfigError
from services.trainer.config import TrainerConfig
from services.trainer.data.config import DataConfig


class Both(Config):
    """A recipe with the trainer's sections."""

    trainer: TrainerConfig = TrainerConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainer.max_staleness=-1", r"trainer\.max_staleness = '-1'"),
        ("--trainer.row_lengths=8", r"row_lengths = 8 has no effect without padding; set fixed_rows = true"),
        ("--trainer.samples_per_group=1", r"trainer\.samples_per_group = '1'"),
        ("--trainer.weight_sync.mode=abort", r"trainer\.weight_sync\.mode = 'abort'.*'retract', 'in_place' or 'drain'"),
        (
            "--trainer.weight_sync.transport=nfs",
            r"weight_sync\.transport = 'nfs'.*'disk', 'shared_memory' or 'delta'",
        ),
        ("--trainer.optimizer.betas=[0.9, 1.0]", r"trainer\.optimizer\.betas = .*below 1"),
        ("--trainer.optimizer.learning_rate=0", r"trainer\.optimizer\.learning_rate"),
        ("--trainer.optimizer.learning_rate=inf", r"trainer\.optimizer\.learning_rate = 'inf': .* finite number"),
        ("--sampling.temperature=0", r"sampling\.temperature = '0'"),
    ],
)
def test_refuses_values_out_of_range(tmp_path: Path, override: str, message: str) -> None:
    """One line that names key, value and remedy."""
    (tmp_path / "r.toml").write_text("")
    with pytest.raises(ConfigError, match=message):
        load(Both, [tmp_path / "r.toml"], [override])


@pytest.mark.parametrize("model", [TrainerConfig, DataConfig, SamplingConfig])
def test_every_setting_is_explained(model: type[Config]) -> None:
    """Field docstrings are the help text; a sub-section is explained by its own docstring."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, Config) and bool(kind.__doc__)
        assert name in field_docstrings(model) or is_section, name
