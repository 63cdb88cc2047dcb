"""Checks SGLang's settings in [rollout.sglang]: whether SGLang has them, and whether Penstock sets them itself.

Names are read from the source of the installed SGLang. It is not imported, because that takes seconds, and a mistyped
name should be reported before a run starts. SGLang checks the values.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_ONE_MACHINE = "an engine uses the GPUs of one machine; set rollout.tensor_parallel, or start more engines"
_OWN_DEVICE = "an engine computes on the GPUs that CUDA_VISIBLE_DEVICES shows it, and without any on the CPU"
_OWN_PORT = "each engine takes a free port"
_SAME_SHAPES = "a push writes the trainer's weights into the engine's parameters, which must be alike"
_ONE_SEED = "it gives all samples of a group one seed, so that they are equal; leave it out"
_SAMPLING = "trainer and engines must sample alike; use [sampling]"

_ONE_GROUP = "pushes need attention divided among all processes of an engine; use rollout.tensor_parallel"
_EXPERTS_STAY = "pushes need each expert where it was at the start; leave it out"

OWN_NAMES: Mapping[str, str] = {
    "attn_cp_size": _ONE_GROUP,
    "attn_dp_size": _ONE_GROUP,
    "base_gpu_id": _OWN_DEVICE,
    "constrained_json_whitespace_pattern": "XGrammar takes no pattern; use constrained_json_max_whitespace_cnt",
    "context_length": "use rollout.context_length",
    "dcp_size": _ONE_GROUP,
    "device": _OWN_DEVICE,
    "disaggregation_bootstrap_port": _OWN_PORT,
    "disaggregation_mode": "use rollout.role",
    "disaggregation_transfer_backend": "use rollout.transfer_backend",
    "dist_init_addr": _ONE_MACHINE,
    "dp_size": "use rollout.replicas",
    "elastic_ep_backend": _EXPERTS_STAY,
    "enable_eplb": _EXPERTS_STAY,
    "ep_dispatch_algorithm": _EXPERTS_STAY,
    "ep_num_redundant_experts": _EXPERTS_STAY,
    "ep_size": "use rollout.expert_parallel",
    "init_expert_location": _EXPERTS_STAY,
    "dtype": "use rollout.dtype",
    "enable_deterministic_inference": _ONE_SEED,
    "enable_metrics": "use metrics.port",
    "enable_fp32_lm_head": "use trainer.float32_head, which holds for trainer and engines",
    "enable_return_routed_experts": "use trainer.router_replay, which holds for trainer and engines",
    "enable_multimodal": "it follows from the model",
    "gpu_id_step": _OWN_DEVICE,
    "grammar_backend": "grammars are XGrammar's; leave it out",
    "host": "use network.host",
    "incremental_streaming_output": "Penstock reads cumulative output; leave it out",
    "max_running_requests": "use rollout.max_running",
    "max_total_tokens": "use rollout.max_total_tokens",
    "mem_fraction_static": "use rollout.gpu_memory_fraction",
    "model_path": "use model.path",
    "moe_a2a_backend": "it lays experts out in its own way, which takes no pushes; use rollout.expert_parallel",
    "nccl_port": _OWN_PORT,
    "nnodes": _ONE_MACHINE,
    "node_rank": _ONE_MACHINE,
    "port": "use rollout.port",
    "pp_size": "use rollout.tensor_parallel; layers are not spread in stages",
    "preferred_sampling_params": _SAMPLING,
    "quantization": _SAME_SHAPES,
    "rl_on_policy_target": _ONE_SEED,
    "sampling_defaults": _SAMPLING,
    "skip_tokenizer_init": "engines receive and return token ids",
    "tokenizer_path": "engines receive and return token ids",
    "tp_size": "use rollout.tensor_parallel",
    "weight_version": "it is the policy version of the last push",
}
"""Names of ServerArgs that [rollout.sglang] must not hold, with the setting to use instead or the reason."""


def require_free(names: Iterable[str]) -> None:
    """Check that none of `names` is Penstock's own.

    Raises:
        ValueError: one is; the message names the setting to use instead.
    """
    for name in names:
        if (instead := OWN_NAMES.get(name.replace("-", "_"))) is not None:
            raise ValueError(f"{name} is set by Penstock: {instead}")


def require_known(names: Iterable[str]) -> None:
    """Check that the installed SGLang knows `names`; pass all if none is installed, or its source has another layout.

    Raises:
        ConfigError: it does not know one; the message suggests the most similar name.
    """
    wanted = list(names)
    known = known_names() if wanted else frozenset()
    for name in wanted:
        if known and name not in known:
            similar = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {similar[0]}?" if similar else "`python -m sglang.launch_server --help` lists them"
            raise ConfigError(f"rollout.sglang.{name}: SGLang has no such setting; {hint}")


def require_used(passed: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    """Check that a recipe's settings are in `args`, the arguments of an engine on a CPU, which fixes some itself.

    Raises:
        ConfigError: the engine needs another value.
    """
    for name, value in passed.items():
        if args[name] != value:
            raise ConfigError(
                f"rollout.sglang.{name} = {value!r}: an engine on a CPU needs {args[name]!r}; leave it out, or run the "
                "recipe where a GPU can be used"
            )


def known_names() -> frozenset[str]:
    """Return the fields of SGLang's ServerArgs; empty if SGLang is not installed, or its source has another layout."""
    package = importlib.util.find_spec("sglang")
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("srt/arg_groups/fields/*.py")]
    return frozenset(name for file in files for name in _fields(file) if not name.startswith("_"))


def _fields(file: Path) -> Iterator[str]:
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef):
            for field in statement.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id
