"""What NCCL is told where trainer or engine have a GPU."""

import datetime
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs
from torch.distributed import distributed_c10d

from penstock.config import NetworkConfig
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang import settings
from services.rollout.engine.sglang_plugin.variables import GROUP_TIMEOUT_VARIABLE
from services.trainer.weight_sync import process_group
from services.trainer.weight_sync.process_group import WeightProcessGroup

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


def listening() -> WeightProcessGroup:
    """A rendezvous that nobody joins."""
    return WeightProcessGroup.listen(host="127.0.0.1", name="push", world_size=2, backend="nccl")


@pytest.mark.usefixtures("rendezvous")
def test_connecting_to_a_dead_member_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a blocking group was seen to connect for ever, and its deadline with it."""
    given: dict[str, Any] = {}

    def make(*_: Any, backend_options: Any, **__: Any) -> tuple[str, None]:
        given["options"] = backend_options
        return "group", None

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    group = listening()
    group.form(timeout_s=7.0)
    assert given["options"].config.blocking == 0
    assert given["options"]._timeout.total_seconds() == 7.0
    distributed_c10d._world.pg_group_ranks.pop("group")
    monkeypatch.setattr(process_group, "_leave", lambda _: None)
    group.close()


def test_an_engine_connects_without_blocking_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the groups of pushes; what SGLang makes with another backend stays as it is."""
    from services.rollout.engine.sglang_plugin import hooks

    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "7")
    _, kwargs = hooks._bound_group(backend="nccl", rank=1)
    assert kwargs["pg_options"].config.blocking == 0
    assert kwargs["pg_options"]._timeout == kwargs["timeout"] == datetime.timedelta(seconds=7)
    _, kwargs = hooks._bound_group(backend="gloo", rank=1)
    assert kwargs == {"backend": "gloo", "rank": 1, "timeout": datetime.timedelta(seconds=7)}


@pytest.mark.usefixtures("rendezvous")
def test_a_group_that_cannot_be_taken_apart_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU NCCL was seen to take longer than a push may, after a member had died in the midst of a transfer."""
    may_end = threading.Event()
    monkeypatch.setattr(process_group, "_leave", lambda _: may_end.wait())
    monkeypatch.setattr(process_group, "_LEAVE_S", 0.1)
    group = listening()
    with capture_logs() as events:
        group.close()
    assert [event["event"] for event in events] == ["process_group.still_leaving"]
    assert group.is_closed
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "leave push":
            thread.join()
