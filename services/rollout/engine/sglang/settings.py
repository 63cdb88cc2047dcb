"""SGLang's settings: its defaults on a GPU, plain PyTorch in one thread on a CPU.

`environment` must be set before SGLang is imported, so nothing here imports it.
"""

import ctypes
import itertools
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import NetworkConfig
from penstock.errors import ConfigError
from penstock.model import tokens
from penstock.model.families.experts import has_experts
from penstock.model.families.linear_attention import attends_linearly, settings_for_sglang
from penstock.model.families.qwen_vl import require_published_tower
from penstock.model.folder import read_json
from penstock.model.parameters import parameter_sizes
from penstock.model.precision import resolve_dtype
from penstock.weights import nccl
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.linear_attention import require_servable
from services.rollout.engine.sglang import recipe_settings
from services.rollout.engine.sglang_plugin.variables import (
    GROUP_TIMEOUT_VARIABLE,
    LINEAR_ATTENTION_VARIABLE,
    START_METHOD_VARIABLE,
)

MAX_CPU_TOKENS = 65_536
"""Default limit of the KV cache of an engine on a CPU, in tokens."""

IMAGE_CACHE_MB = 256
"""Megabytes of preprocessed images that an engine on a CPU keeps for the other samples of their group and for later
turns. They do not depend on weights. On GPUs SGLang decides, because on some it handles uncached features faster."""

_CPU_DEFAULTS = {
    "mm_preprocess_cache_size_mb": IMAGE_CACHE_MB,
    "mm_processor_worker_num": 1,  # more threads would compete with the scheduler for cores
}
_CPU_ARGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "lora_backend": "torch_native",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # otherwise an idle scheduler spins on a core that the trainer needs
    "disable_custom_all_reduce": True,  # only GPUs have it
}


_PLUGIN = "services.rollout.engine.sglang_plugin"

_STATES_PER_REQUEST = 4
"""Slots for states of an engine on a CPU, which would otherwise take half of the memory: SGLang wants three, and
prefixes in the cache keep theirs."""

_LAYOUT_OF_EXPERTS_KEPT = "triton"
"""Other layouts repack experts at load (the default on Blackwell), so that no push would fit."""


def has_cuda() -> bool:
    """Return whether this process may use a GPU. Asks the driver: torch, once asked, could not be forked any more."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def environment(
    config: RolloutConfig, network: NetworkConfig, *, group_timeout_s: float, cuda: bool, is_linear: bool = False
) -> dict[str, str]:
    """Return the environment variables to set before SGLang is imported.

    Args:
        config: The engine's settings.
        network: Its addresses.
        group_timeout_s: Maximum seconds to form the process group of a broadcast.
        cuda: Whether it may use a GPU.
        is_linear: Whether its model attends linearly.
    """
    shared = {
        # SGLang keeps its cache of image embeddings over a weight update, and would serve embeddings of the old
        # weights.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        # If this process inherited 1, SGLang would return logprobs of the distribution before the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        GROUP_TIMEOUT_VARIABLE: str(group_timeout_s),
        LINEAR_ATTENTION_VARIABLE: "1" if is_linear else "",
        # Otherwise the last tokens that a convolution sees are rounded to bfloat16, whatever the precision.
        "SGLANG_MAMBA_CONV_DTYPE": resolve_dtype(config.dtype, on_gpu=cuda),
        "SGLANG_MAMBA_SSM_DTYPE": "float32",  # states are as precise as the trainer's
        "TOKENIZERS_PARALLELISM": "false",
        **disaggregation.environment(config, network, cuda=cuda),
    }
    if cuda:
        return {**shared, **nccl.environment(), START_METHOD_VARIABLE: "spawn"}
    return {
        **shared,
        START_METHOD_VARIABLE: "fork",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": f"{_PLUGIN}.linear_attention.models" if is_linear else f"{_PLUGIN}.models",
        "TORCHDYNAMO_DISABLE": "1",
        **_cores_of_ranks(config.tensor_parallel),
    }


def _cores_of_ranks(count: int) -> dict[str, str]:
    """Return the variable that binds each process of an engine on a CPU to a core.

    Without it SGLang starts at most one process per NUMA node. With too few cores, processes share them. The first core
    is random, so that engines do not all choose the same.
    """
    if count == 1:
        return {}
    usable = sorted(os.sched_getaffinity(0))
    cores = itertools.islice(itertools.cycle(usable), random.randrange(len(usable)), None)
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(next(cores)) for _ in range(count))}


def server_args(
    config: RolloutConfig,
    network: NetworkConfig,
    model_path: Path,
    *,
    float32_head: bool,
    bootstrap_port: int,
    cuda: bool,
    router_replay: bool = False,
    enable_metrics: bool = False,
) -> dict[str, Any]:
    """Return `sglang.Engine`'s arguments: the recipe's override our defaults, Penstock's requirements override both.

    Raises:
        ConfigError: the recipe sets a value that an engine on a CPU, or of this model, cannot have, the model is
            damaged, or SGLang computes it differently from transformers.
    """
    model = read_json(model_path / "config.json")
    require_published_tower(model)
    require_servable(config, model)
    parameter_sizes(model_path)  # names a damaged file, which SGLang's processes would not
    args: dict[str, Any] = {
        "model_path": str(model_path),
        "dtype": resolve_dtype(config.dtype, on_gpu=cuda),  # SGLang's own auto would take float16 for some checkpoints
        "enable_fp32_lm_head": float32_head,
        "enable_return_routed_experts": router_replay,
        "max_running_requests": config.max_running,
        "skip_tokenizer_init": True,  # token in, token out
        "weight_version": "0",
        "enable_multimodal": "vision_config" in model,
        "tp_size": config.tensor_parallel,
        "ep_size": config.expert_parallel,
        "enable_metrics": enable_metrics,
        **disaggregation.server_args(config, network, bootstrap_port=bootstrap_port, cuda=cuda),
    }
    if config.context_length:
        args["context_length"] = config.context_length
    if config.max_total_tokens:
        args["max_total_tokens"] = config.max_total_tokens
    passed = {"log_level": "error", **config.sglang}
    is_linear = attends_linearly(str(model.get("model_type")))
    if is_linear:
        args["json_model_override_args"] = json.dumps(settings_for_sglang(model))
    if cuda:
        if has_experts(str(model.get("model_type"))):
            passed = {"moe_runner_backend": _LAYOUT_OF_EXPERTS_KEPT, **passed}
        return {**passed, **args, "mem_fraction_static": config.gpu_memory_fraction}
    _require_heads_for(config.tensor_parallel, model)
    if is_linear:
        passed = {"max_mamba_cache_size": _STATES_PER_REQUEST * config.max_running, **passed}
    context = context_length(config, model_path)
    args.setdefault("max_total_tokens", max(context, min(MAX_CPU_TOKENS, config.max_running * context)))
    args = {**_CPU_DEFAULTS, **passed, **args, **_CPU_ARGS}
    recipe_settings.require_used(config.sglang, args)
    return args


def _require_heads_for(tensor_parallel: int, model: Mapping[str, Any]) -> None:
    """Refuse processes that would share heads on a CPU: SGLang pads these heads and then cannot load them. GPUs can."""
    text = model.get("text_config", model)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
    if heads % tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {tensor_parallel}: on a CPU the model's {heads} heads of keys and values "
            f"cannot be divided among {tensor_parallel} processes; set it to a divisor of {heads}"
        )


def context_length(config: RolloutConfig, model_path: Path) -> int:
    """Return the maximum tokens of prompt and response together.

    Raises:
        ConfigError: neither the recipe nor the model sets it.
    """
    length = config.context_length or tokens.context_length(model_path)
    if length is None:
        raise ConfigError(
            f"model.path: {model_path / 'config.json'} has no max_position_embeddings; "
            "give --rollout.context_length=..."
        )
    return length
