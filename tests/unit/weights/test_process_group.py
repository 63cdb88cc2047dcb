"""Opening the rendezvous of a push."""

from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import SetupError
from services.trainer.weight_sync.process_group import WeightProcessGroup


@pytest.fixture
def timeouts(rendezvous: None, monkeypatch: pytest.MonkeyPatch) -> list[RuntimeError]:
    """Errors of the next connections to a rendezvous."""
    store, errors = dist.TCPStore, list[RuntimeError]()

    def connect(*args: Any, is_master: bool, **options: Any) -> dist.TCPStore:
        if errors and not is_master:
            raise errors.pop()
        return store(*args, is_master=is_master, **options)

    monkeypatch.setattr(dist, "TCPStore", connect)
    return errors


def test_a_trainer_that_stood_still_as_it_connected_connects_again(timeouts: list[RuntimeError]) -> None:
    """As after SIGSTOP, or a pause of its machine; its address is right."""
    timeouts.append(RuntimeError("The client socket has timed out after 5000ms"))
    WeightProcessGroup.listen(host="127.0.0.1", name="push", world_size=1, backend="gloo").close()
    assert not timeouts


def test_an_address_that_is_out_of_reach_is_refused(timeouts: list[RuntimeError]) -> None:
    """Tries end."""
    timeouts.extend(RuntimeError("The client socket has timed out after 5000ms") for _ in range(9))
    with pytest.raises(SetupError, match=r"network\.advertise_host = '127\.0\.0\.1': cannot listen .* timed out"):
        WeightProcessGroup.listen(host="127.0.0.1", name="push", world_size=1, backend="gloo")
