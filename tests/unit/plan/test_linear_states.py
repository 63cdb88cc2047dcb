"""How an engine divides its memory between states and the KV cache, by hand."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.plan import memory_plan
from services.plan.engine_plan import plan_engine
from services.plan.linear_attention.states import LinearStates
from services.plan.memory_plan import plan_memory
from services.plan.model_shape import ModelShape
from services.plan.process_plan import GIB, Gpus, ProcessPlan
from services.plan.working_memory import WorkingBytes
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from tests.support.trainer.families import random_qwen3_5_text

STATE = 3 * (4 * 16 * 16 * 4 + (2 * 2 * 16 + 4 * 16) * 3 * 2)
"""Bytes of a state of the small model: layers, matrices of all heads in float32, windows in half precision."""
PER_TOKEN = 2 * 1 * 2 * 32 * 2
"""Keys and values of the one layer that attends, heads, sizes, bytes."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Qwen3.5: three layers of 4 heads of 16 x 16, and one that attends."""
    monkeypatch.setattr(memory_plan, "working_bytes", lambda *_, **__: WorkingBytes(activations=GIB, logits=0))
    random_qwen3_5_text().config.save_pretrained(tmp_path)
    return tmp_path


def engine_of(model: Path, *settings: str, gpus: str = "8x0.02") -> ProcessPlan:
    """The plan of a recipe's engine."""
    base = ("--rollout.replicas=1", "--rollout.context_length=1000", f"--model.path={model}")
    recipe = load(Recipe, [], ['--run.name="a"', *base, *settings])
    shape = ModelShape.read(model)
    return plan_engine(shape, recipe, Gpus.parse(gpus), count=1, free_bytes=0)


def numbers_of(engine: ProcessPlan) -> list[int]:
    """Tokens and states that its notes name, and if states bound them the requests that run at once."""
    tokens, states = (note.split("holds ")[-1].split("keeps ")[-1].split()[0] for note in engine.notes[:2])
    bound = engine.notes[1].partition(" for each request: ")[2].partition(" run at once")[0]
    return [int(each.replace(",", "")) for each in (tokens, states, bound) if each]


def test_states_take_their_share_first(model: Path) -> None:
    """0.9 of what the KV cache has, less one state that no request has; a request needs five."""
    room = int(0.85 * int(0.02 * GIB)) - 2 * ModelShape.read(model).num_parameters
    states = int(room * 0.9 / 1.9) // STATE - 1
    engine = engine_of(model, "--rollout.max_running=1000")
    assert numbers_of(engine) == [(room - (states + 1) * STATE) // PER_TOKEN, states, states // 5]
    assert engine.notes[1] == (
        f"it keeps {states:,} states of 0.0 MiB, 5 for each request: {states // 5} run at once, whatever "
        "rollout.max_running = 1000 says; rollout.sglang.mamba_full_memory_ratio gives states more of the memory"
    )


def test_nothing_is_said_of_requests_that_all_run(model: Path) -> None:
    """As many as the recipe wants."""
    assert engine_of(model, "--rollout.max_running=2").notes[1].endswith("MiB, 5 for each request")


def test_the_least_is_what_divides_into_enough_of_both(model: Path) -> None:
    """An engine with a thousandth less starts with too few states for a request, or tokens for a sample."""
    for tokens in (1, 1000):
        engine = engine_of(model, f"--rollout.context_length={tokens}")
        weights, cache, states, added = (part.size_bytes for part in engine.moments[0].parts)
        assert (cache, states) == (tokens * PER_TOKEN, 6 * STATE)
        room = engine.moments[0].total_bytes - weights
        found = LinearStates.of(ModelShape.read(model).text, RolloutConfig())
        assert added > 0

        def divided(room: int, found: LinearStates = found) -> tuple[int, int]:
            num = found.num_in(room)
            return num, (room - found.bytes_of(num)) // PER_TOKEN

        num, num_tokens = divided(room)
        assert num >= 5
        assert num_tokens >= tokens
        num, num_tokens = divided(int(room * 0.999))
        assert num < 5 or num_tokens < tokens + STATE // PER_TOKEN


@pytest.mark.parametrize(
    ("settings", "per_request"),
    [
        ({}, 5),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ({"disable_overlap_schedule": True}, 3),
        ({"disable-overlap-schedule": True, "page-size": 64}, 4),
        ({"linear_attn_backend": "cutedsl"}, 3),
        ({"mamba_radix_cache_strategy": "no_buffer"}, 3),
        ({"disable_radix_cache": True}, 1),
    ],
    ids=str,
)
def test_a_request_needs_states(settings: dict[str, Any], per_request: int, model: Path) -> None:
    """By the strategy of the prefix cache."""
    found = LinearStates.of(ModelShape.read(model).text, RolloutConfig(sglang=settings))
    assert found.num_per_request == per_request


def test_settings_of_the_recipe(model: Path) -> None:
    """A number, a share, a precision, and no prefix cache: then each running request has one."""
    text = ModelShape.read(model).text
    windows = 3 * 128 * 3 * 2

    def states(**sglang: Any) -> LinearStates:
        return LinearStates.of(text, RolloutConfig(max_running=7, sglang=sglang))

    assert states(max_mamba_cache_size=60).num_in(1) == 60
    assert states(disable_radix_cache=True).num_in(1) == 7
    assert states(mamba_full_memory_ratio=0.5).num_in(300 * STATE) == 99
    assert LinearStates.of(text, RolloutConfig(tensor_parallel=2)).size_bytes == STATE // 2
    assert states(mamba_ssm_dtype="bfloat16").size_bytes == windows + (STATE - windows) // 2
    engine = engine_of(model, "--rollout.sglang.max_mamba_cache_size=60")
    assert [part.size_bytes for part in engine.moments[0].parts[2:]] == [61 * STATE]
    assert "12 run at once" in engine.notes[1]
    assert engine.notes[1].endswith("rollout.sglang.max_mamba_cache_size gives states more of the memory")
    with pytest.raises(ConfigError, match=r"max_mamba_cache_size = 4: a request needs 5 states"):
        states(max_mamba_cache_size=4)
    for setting in ({"max_mamba_cache_size": 7.5}, {"mamba_full_memory_ratio": 0}):
        with pytest.raises(ConfigError, match=r"= (7\.5 is no positive whole|0 is no positive) number"):
            states(**setting)


def test_what_engines_and_trainer_refuse_is_not_planned(model: Path) -> None:
    """In their words."""
    for setting, error in {
        "--rollout.tensor_parallel=4": r"rollout\.tensor_parallel = 4 does not divide linear_num_key_heads = 2",
        "--trainer.compile=true": r"trainer\.compile = true does not go with linear attention",
        "--trainer.sequence_parallel=2": r"trainer\.sequence_parallel = 2 does not go with linear attention",
        "--trainer.lora.rank=4": r"trainer\.lora\.rank = 4 does not go with linear attention",
    }.items():
        recipe = load(Recipe, [], ['--run.name="a"', f"--model.path={model}", "--trainer.ranks=1", setting])
        with pytest.raises(ConfigError, match=error):
            plan_memory(model, recipe, Gpus.parse("8x80"), image_share=0.0)
