"""States and KV cache, divided as the installed SGLang divides them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from services.plan.linear_attention.states import LinearStates
from services.plan.process_plan import GIB
from services.rollout.engine.config import RolloutConfig


@pytest.fixture(scope="module")
def modules() -> tuple[Any, Any]:
    """SGLang's sizes of states, and what divides the memory, whose imports warn of missing GPUs."""
    with warnings.catch_warnings(action="ignore"):
        from sglang.srt.configs import mamba_utils
        from sglang.srt.mem_cache import kv_cache_configurator
    return mamba_utils, kv_cache_configurator


@pytest.fixture
def sglang(modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's division, given a model, bytes and SGLang's settings."""
    mamba_utils, kv_cache_configurator = modules
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")

    def divided(
        text: Any, room_bytes: int, *, extra_buffer: bool = True, tensor_parallel: int = 1, **settings: Any
    ) -> tuple[int, int, int]:
        """Return the states, those of a request, and the bytes that are left for the KV cache."""
        values = text.linear_num_value_heads * text.linear_value_head_dim
        shape = mamba_utils.Mamba2StateShape.create(
            tp_world_size=tensor_parallel,
            intermediate_size=values,
            n_groups=text.linear_num_key_heads,
            num_heads=text.linear_num_value_heads,
            head_dim=text.linear_value_head_dim,
            state_size=text.linear_key_head_dim,
            conv_kernel=text.linear_conv_kernel_dim,
        )
        layers = [number for number, kind in enumerate(text.layer_types) if kind == "linear_attention"]
        params = mamba_utils.Mamba2CacheParams(shape=shape, layers=layers)
        schedule = SimpleNamespace(
            **{"max_running_requests": 64, "max_mamba_cache_size": None, "mamba_full_memory_ratio": 0.9},
            **{"disable_overlap_schedule": False},
        )
        schedule.__dict__.update(settings)
        mamba = SimpleNamespace(
            enable_mamba_extra_buffer=extra_buffer,
            enable_mamba_extra_buffer_lazy=False,
            enable_linear_replayssm_spec=False,
        )
        context = SimpleNamespace(override=lambda _, **changed: schedule.__dict__.update(changed))
        getters = {
            "get_schedule": schedule,
            "get_memory": SimpleNamespace(disable_radix_cache=False),
            "get_exec": SimpleNamespace(mamba=mamba),
            "get_context": context,
        }
        for name, value in getters.items():
            monkeypatch.setattr(kv_cache_configurator, name, lambda value=value: value)
        configurator = SimpleNamespace(
            mambaish_config=SimpleNamespace(mamba2_cache_params=params),
            **{"pp_size": 1, "attn_dp_size": 1, "extra_mamba_cache_bytes_per_req": 0, "hybrid_kda_config": None},
            fused_entry_bytes=lambda _: None,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
        owner = kv_cache_configurator.KVCacheConfigurator
        left = owner._handle_max_mamba_cache(configurator, room_bytes / 2**30)
        return schedule.max_mamba_cache_size, owner._calculate_mamba_ratio(configurator), int(left * 2**30)

    return divided


@pytest.mark.slow
def test_sglang_divides_so(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed one, with the shape that transformers gives a Qwen3.5 by default, on GPUs of several sizes."""
    from transformers import Qwen3_5TextConfig

    text = Qwen3_5TextConfig()
    for rollout in (RolloutConfig(), RolloutConfig(sglang={"mamba_full_memory_ratio": 0.3})):
        found = LinearStates.of(text, rollout)
        for room in (3 * GIB, 27 * GIB + 12345, 50 * GIB, 111 * GIB):
            num = found.num_in(room)
            states, per_request, left = sglang(text, room, mamba_full_memory_ratio=found.ratio)
            assert (num, found.num_per_request) == (states, per_request)
            assert room - found.bytes_of(num) == pytest.approx(left, abs=1024)
    set_number = LinearStates.of(text, RolloutConfig(sglang={"max_mamba_cache_size": 40}))
    states, _, left = sglang(text, 50 * GIB, max_mamba_cache_size=40)
    assert (set_number.num_in(50 * GIB), 50 * GIB - set_number.bytes_of(40)) == (states, left)
    no_buffer = LinearStates.of(text, RolloutConfig(sglang={"disable_overlap_schedule": True}))
    assert no_buffer.num_per_request == sglang(text, GIB * 9, extra_buffer=False, disable_overlap_schedule=True)[1]
    of_two = LinearStates.of(text, RolloutConfig(tensor_parallel=2))
    assert of_two.num_in(GIB * 9) == sglang(text, GIB * 9, tensor_parallel=2)[0]
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    halved = LinearStates.of(text, RolloutConfig(sglang={"mamba_ssm_dtype": "bfloat16"}))
    assert halved.num_in(GIB * 9) == sglang(text, GIB * 9)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"disable_overlap_schedule": True},
        {"disable_overlap_schedule": True, "page_size": 16},
        {"linear_attn_backend": "flashinfer"},
        {"mamba_radix_cache_strategy": "no_buffer"},
        {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
        {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_sglang_gives_a_request_so_many(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, and those that its prefix cache takes, with the installed one's defaults."""
    from transformers import Qwen3_5TextConfig

    with warnings.catch_warnings(action="ignore"):
        from sglang.srt.arg_groups import overrides
        from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    text = Qwen3_5TextConfig(architectures=["Qwen3_5ForConditionalGeneration"])
    monkeypatch.setattr(overrides, "model_config_of", lambda _: SimpleNamespace(hf_config=text))
    view = SimpleNamespace(
        **{"disable_radix_cache": False, "disable_overlap_schedule": False, "page_size": None},
        **{"linear_attn_backend": "triton", "mamba_radix_cache_strategy": "auto"},
    )
    view.__dict__.update(settings)
    view.__dict__.update(overrides._mamba_radix_cache_resolution(view))
    strategy = view.mamba_radix_cache_strategy
    slots = get_mamba_tracking_slots(
        extra_buffer=strategy != "no_buffer",
        overlap=not view.disable_overlap_schedule,
        lazy=strategy == "extra_buffer_lazy",
    )
    assert LinearStates.of(text, RolloutConfig(sglang=settings)).num_per_request == 3 + slots
