"""All that a run stores in NATS."""

from penstock.bus.connection import BUCKETS, Bus
from penstock.bus.image_store import ImageStore
from penstock.bus.recordings import Recordings
from penstock.bus.sessions import Sessions
from penstock.bus.span_stream import ensure_span_stream


async def store_everything(bus: Bus, *, lease_ttl_s: float) -> None:
    """Make every stream and every bucket of the run, and store an image."""
    await bus.ensure_streams()
    images = ImageStore(bus)
    await images.ensure()
    await images.put("run.1", b"picture")
    await Recordings(bus).ensure(max_age_s=3600.0, max_bytes=2**20)
    await Sessions(bus).ensure()
    await ensure_span_stream(bus)
    for name in BUCKETS:
        await bus.bucket(name, ttl_s=lease_ttl_s if name in ("replicas", "deaths") else None)
