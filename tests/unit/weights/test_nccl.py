"""What NCCL is told where trainer or engine have a GPU."""

import pytest

from penstock.config import NetworkConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings

HANDLING, SHARING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_MULTI_RANK_GPU_ENABLE"


def test_an_engine_on_a_gpu_outlives_its_group_and_may_share_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody has said otherwise; on a CPU neither is set."""
    monkeypatch.delenv(HANDLING, raising=False)
    monkeypatch.delenv(SHARING, raising=False)
    environment = settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=30.0, cuda=True)
    assert (environment[HANDLING], environment[SHARING]) == ("2", "1")
    monkeypatch.setenv(HANDLING, "3")
    environment = settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=30.0, cuda=True)
    assert (environment[HANDLING], environment[SHARING]) == ("3", "1")
    on_cpu = settings.environment(RolloutConfig(), NetworkConfig(), group_timeout_s=30.0, cuda=False)
    assert not {HANDLING, SHARING} & on_cpu.keys()
