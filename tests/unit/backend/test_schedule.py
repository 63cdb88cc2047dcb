"""Learning-rate schedules: by hand, and beside transformers' own."""

import pytest
import torch
from transformers import get_scheduler

from penstock.config import load
from penstock.errors import ConfigError
from services.launch.checks.training_inputs import require_trainable_without_model
from services.recipe import Recipe
from services.trainer.backend.optimizer.schedule import rate_factor
from services.trainer.checks.schedule import warmup_doubt
from services.trainer.config import OptimizerConfig

NUM_UPDATES = 40
WARMUP = 5


def factors(warmup: int = WARMUP, **schedule: object) -> list[float]:
    """Of every update of a run, and of ten more."""
    config = OptimizerConfig.model_validate({"warmup_steps": warmup, "schedule": schedule})
    return [rate_factor(update, config, num_updates=NUM_UPDATES) for update in range(NUM_UPDATES + 10)]


def transformers_factors(name: str, **options: object) -> list[float]:
    """What its scheduler multiplies a rate of 1 with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=WARMUP,
        num_training_steps=None if name == "warmup_stable_decay" else NUM_UPDATES,
        scheduler_specific_kwargs=options,
    )
    rates = []
    for _ in range(NUM_UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_is_linear_and_never_zero(kind: str) -> None:
    """The first update already moves, and the first after the warm-up has the whole rate."""
    wsd = {"decay_steps": 10} if kind == "wsd" else {}
    assert factors(kind=kind, **wsd)[: WARMUP + 1] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert factors(0, kind=kind, **wsd)[0] == 1


@pytest.mark.parametrize(
    ("ours", "name", "options"),
    [
        ({"kind": "linear"}, "linear", {}),
        ({"kind": "cosine"}, "cosine", {}),
        ({"kind": "cosine", "min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        *(
            (
                {"kind": "wsd", "decay_steps": 15, "decay": decay, "min_ratio": 0.1},
                "warmup_stable_decay",
                {"num_stable_steps": 20, "num_decay_steps": 15, "decay_type": decay, "min_lr_ratio": 0.1},
            )
            for decay in ("linear", "cosine", "1-sqrt")
        ),
    ],
)
def test_after_the_warm_up_it_is_transformers_schedule(
    ours: dict[str, object], name: str, options: dict[str, object]
) -> None:
    """An independent implementation of the same formulas."""
    assert factors(**ours)[WARMUP:NUM_UPDATES] == pytest.approx(transformers_factors(name, **options)[WARMUP:])


@pytest.mark.parametrize("schedule", [{"kind": "linear"}, {"kind": "cosine"}, {"kind": "wsd", "decay_steps": 8}])
def test_it_ends_at_the_minimum_and_stays_there(schedule: dict[str, object]) -> None:
    """Also in a run that was made longer than the schedule knew."""
    values = factors(**schedule, min_ratio=0.25)
    assert values[NUM_UPDATES:] == [0.25] * 10
    falling = values[WARMUP:]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.kind=wsd"], "wsd needs decay_steps"),
        (["schedule.kind=wsd", "schedule.decay_steps=96", "warmup_steps=5"], "do not fit into 100 steps"),
        (["schedule.kind=cosine", "warmup_steps=100"], "do not fit into 100 steps"),
        (["schedule.kind=cosine", "schedule.decay_steps=3"], "decay_steps = 3 has no effect with kind = 'cosine'"),
        (["schedule.min_ratio=0.1"], "min_ratio = 0.1 has no effect with kind = 'constant'"),
        (["learning_rates.tower=-1"], "the rate of 'tower' must be 0 or a positive number"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    """Each with the setting and what to do."""
    with pytest.raises(ConfigError, match=message):
        load(Recipe, [], [f"--trainer.optimizer.{override}" for override in overrides])


def test_a_run_that_ends_within_its_warm_up_is_doubted() -> None:
    """Also at its last step, which has less than the whole rate."""
    optimizer = OptimizerConfig(warmup_steps=5)
    assert warmup_doubt(optimizer, num_steps=6) == ""
    assert "warmup_steps = 5 is not below the number of steps, 5: the run ends" in warmup_doubt(optimizer, num_steps=5)


def test_the_epochs_of_a_supervised_run_make_room_for_its_schedule() -> None:
    """The default of a number of steps that they replace does not; training from rewards takes that number."""
    settings = ("--sft.epochs=3", "--trainer.optimizer.schedule.kind=cosine", "--trainer.optimizer.warmup_steps=200")
    recipe = load(Recipe, [], settings)
    with pytest.raises(ConfigError, match=r"trainer\.num_steps = 100: trainer\.optimizer\.warmup_steps = 200"):
        require_trainable_without_model(recipe)
