"""All simulated engines of a run in one process, which reports when they serve and ends with its standard input.

python -m bench.async_loop.engines_process --config RECIPE --workload FILE --replicas N --slots N

With --own-connections each engine has a connection of its own to nats-server, as real ones have.
"""

import argparse
import asyncio
import contextlib
import gc
import sys
from pathlib import Path

from bench.async_loop.workload import Workload
from penstock import config as configuration
from penstock.bus.connection import connect
from penstock.runtime import process
from penstock.telemetry import log
from penstock.testing.paced_engine import Pace, PacedEngine
from penstock.v1 import generate_pb2
from services.recipe import Recipe
from services.rollout.testing.weight_reader import WeightReader

_START_AT_ONCE = 32


def main() -> int:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first replica")
    parser.add_argument("--own-connections", action="store_true", help="one to nats-server for each engine")
    options = parser.parse_args()
    recipe = configuration.load(Recipe, [options.config])
    log.configure(recipe.log, service="engines")
    return process.run(lambda stop: _serve(recipe, options, stop))


async def _serve(recipe: Recipe, options: argparse.Namespace, stop: asyncio.Event) -> None:
    workload, weights = Workload.read(options.workload), WeightReader()

    def pace(request: generate_pb2.GenerateRequest) -> Pace:
        _, index, _, _, sample = request.session_id.split("/")  # the group's message id, and the sample's number
        return Pace(num_tokens=workload.num_tokens(int(index))[int(sample)], token_s=workload.token_s)

    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(recipe.bus, run=recipe.run.name))
        await bus.ensure_streams()

        async def start(number: int) -> None:
            own = bus
            if options.own_connections:
                own = await stack.enter_async_context(connect(recipe.bus, run=recipe.run.name))
            name = f"engine-{number:04}"
            engine = PacedEngine(own, pace=pace, weights=weights, replica_id=name, max_running=options.slots)
            await stack.enter_async_context(engine.running())

        numbers = range(options.first, options.first + options.replicas)
        for first in range(0, len(numbers), _START_AT_ONCE):
            await asyncio.gather(*map(start, numbers[first : first + _START_AT_ONCE]))
        gc.collect()
        gc.freeze()
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()


if __name__ == "__main__":
    sys.exit(main())
