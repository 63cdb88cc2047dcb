"""What tests of the publisher share."""

import pytest

from penstock.config import BusConfig


@pytest.fixture
def bus_config(nats_url: str) -> BusConfig:
    """Leases that do not lapse while the machine is busy: a replica that seems gone would be left out of a push."""
    return BusConfig(url=nats_url, lease_ttl_s=30.0, ack_wait_s=1.0)
