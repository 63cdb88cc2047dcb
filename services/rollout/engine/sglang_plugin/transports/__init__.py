"""The engine's end of each transport, named as in `trainer.weight_sync.transport`.

A transport is checked in the engine's process when a push is announced (`accept`). It then travels to SGLang's
scheduler as JSON, and yields the weights there (`arrivals`).
"""

from typing import TypeAlias

from services.rollout.engine.sglang_plugin.transports.broadcast import BroadcastTransport
from services.rollout.engine.sglang_plugin.transports.delta import DeltaTransport
from services.rollout.engine.sglang_plugin.transports.disk import DiskTransport
from services.rollout.engine.sglang_plugin.transports.shared_memory import SharedMemoryTransport

Transport: TypeAlias = BroadcastTransport | DiskTransport | SharedMemoryTransport | DeltaTransport

__all__ = ["BroadcastTransport", "DeltaTransport", "DiskTransport", "SharedMemoryTransport", "Transport"]
