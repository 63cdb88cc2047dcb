"""Loads SGLang into this process: its variables, its modules, and its engine with the model."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.config import NetworkConfig
from penstock.errors import SetupError
from penstock.model.families.linear_attention import has_linear_attention
from penstock.runtime.imports import kept_for_ever
from penstock.runtime.ports import held_ports
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings

log = structlog.get_logger()


def load(
    config: RolloutConfig,
    model_path: Path,
    *,
    network: NetworkConfig,
    float32_head: bool,
    group_timeout_s: float,
    router_replay: bool,
    enable_metrics: bool,
) -> Any:
    """Return SGLang's engine with the model loaded. Blocks for 10 to 60 s.

    Call it in the main thread, before gRPC is used: on a CPU it forks.

    Raises:
        ConfigError: as `settings.server_args`.
        SetupError: SGLang did not start.
    """
    cuda = settings.has_cuda()
    is_linear = has_linear_attention(model_path)
    os.environ.update(
        settings.environment(config, network, group_timeout_s=group_timeout_s, cuda=cuda, is_linear=is_linear)
    )
    disaggregation.require_transfer_backend(config, cuda=cuda)
    if not cuda:
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # kernels for GPUs: seconds to import, of no use
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # torch has read the variable by now; SGLang's processes are forked from here
    # It warns about kernels that a machine without a GPU lacks.
    with kept_for_ever(), warnings.catch_warnings(action="ignore"):
        from sglang.srt.entrypoints.engine import Engine

    with held_ports(2) as (nccl_port, bootstrap_port):  # the ports are held until SGLang listens on them
        args = settings.server_args(
            config,
            network,
            model_path,
            float32_head=float32_head,
            router_replay=router_replay,
            bootstrap_port=bootstrap_port,
            cuda=cuda,
            enable_metrics=enable_metrics,
        )
        try:
            return Engine(**args, nccl_port=nccl_port)
        except Exception as error:  # it checks arguments by assertions, too, or by using them
            log.debug("engine.not_started", exc_info=error)
            raise SetupError(_why_not_started(error, config, model_path)) from error


def _why_not_started(error: Exception, config: RolloutConfig, model_path: Path) -> str:
    values = "; check the values in [rollout.sglang]" if config.sglang else ""
    reason = f"{type(error).__name__}: {error}{values}"
    return (
        f"SGLang did not start with model {model_path}: {reason}; its own log above says more, and --log.level=debug "
        "where it happened"
    )
