"""Counts the bytes that the images of one group put on the bus and send to engines, by value and by hash.

    python bench/bench_images.py [--samples 16] [--turns 4] [--megabytes 1] [--engines 2]

Every turn of every sample adds an image that no other sample shows: the worst case. By value, a record or a request
carries its images; those sizes are computed from the messages themselves. By hash, a real nats-server stores them, and
an `ImageStore` each for the worker, every engine and the trainer counts its traffic.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from penstock.bus.connection import connect
from penstock.bus.image_store import ImageStore, hash_of
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.v1 import common_pb2, generate_pb2

MIB = 2**20
SCOPE = "bench.0.0.a"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    draw = random.Random(0)
    images = [[draw.randbytes(size) for _ in range(options.turns)] for _ in range(options.samples)]
    group, requests = by_value(images)
    limit = 32 * MIB
    stored, to_engines, to_trainer, by_hash_requests = asyncio.run(by_hash(images, num_engines=options.engines))
    rows = [
        ("largest record", group, 64 * options.samples * options.turns),
        ("into the bus", group, stored),
        ("from the bus to the trainer", group, to_trainer),
        ("in requests to engines", requests, by_hash_requests),
        ("from the bus to engines", 0, to_engines),
    ]
    sys.stdout.write("| MiB | by value | by hash |\n|---|---|---|\n")
    for name, before, after in rows:
        refused = " (refused: over 32)" if name == "largest record" and before > limit else ""
        sys.stdout.write(f"| {name} | {before / MIB:.1f}{refused} | {after / MIB:.2f} |\n")


def by_value(images: list[list[bytes]]) -> tuple[int, int]:
    """Return the bytes of the group's images in one record, and in all requests of its turns."""
    requests = 0
    for sample in images:
        for turn in range(len(sample)):
            shown = [common_pb2.Image(data=data) for data in sample[: turn + 1]]
            requests += generate_pb2.GenerateRequest(images=shown).ByteSize()
    return sum(len(data) for sample in images for data in sample), requests


async def by_hash(images: list[list[bytes]], *, num_engines: int) -> tuple[int, int, int, int]:
    """Return the bytes stored, fetched by engines, fetched by the trainer, and in requests."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            local_server(Path(folder)) as url,
            connect(BusConfig(url=url), run="bench") as bus,
        ):
            worker, trainer = CountingStore(bus), CountingStore(bus)
            engines = [CountingStore(bus) for _ in range(num_engines)]
            await worker.ensure()
            requests = 0
            for number, sample in enumerate(images):
                shown = []
                for data in sample:  # one turn each: the engine of the sample's session fetches the new images
                    shown.append(await worker.put(SCOPE, data))
                    stored = [common_pb2.StoredImage(sha256=sha256, scope=SCOPE) for sha256 in shown]
                    request = generate_pb2.GenerateRequest(images=[common_pb2.Image(stored=each) for each in stored])
                    requests += request.ByteSize()
                    for sha256 in shown:
                        await engines[number % num_engines].get(SCOPE, sha256)
            for sample in images:
                for data in sample:
                    await trainer.get(SCOPE, hash_of(data))
            return worker.num_stored, sum(engine.num_fetched for engine in engines), trainer.num_fetched, requests


class CountingStore(ImageStore):
    """Counts the bytes that cross its connection."""

    num_stored = 0
    num_fetched = 0

    async def put(self, scope: str, data: bytes) -> str:
        """Store the image and count its bytes."""
        self.num_stored += len(data)
        return await super().put(scope, data)

    async def _fetch(self, subject: str, sha256: str) -> bytes:
        data = await super()._fetch(subject, sha256)
        self.num_fetched += len(data)
        return data


if __name__ == "__main__":
    main()
