"""Simulated engines for churn.py, each a process that can be killed, at the price of a fork.

Reads lines of JSON, {"replica_id": "r001", "policy_version": 1, "max_running": 16}, and forks an engine
(penstock/testing/simulated_engine.py) for each. Once it serves it prints {"replica_id": "r001", "pid": 4711}. SIGTERM
drains it as it drains a real engine: DRAINING in the lease at once, `--grace-s` for running calls, the rest is handed
over. All end with the standard input.

    python bench/support/churn_engines.py --url=nats://... --run=NAME --token-s=0.5 --grace-s=2
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import Any

from penstock.bus.connection import connect
from penstock.config import BusConfig, LogConfig
from penstock.telemetry import log
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import rollout_pb2


async def live(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Serve until SIGTERM, and drain."""
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    async with connect(BusConfig(url=options.url), run=options.run) as bus:
        engine = SimulatedEngine(bus, token_s=options.token_s, tells_load=True, **settings)
        async with engine.running():
            sys.stdout.write(json.dumps({"replica_id": engine.replica_id, "pid": os.getpid()}) + "\n")
            sys.stdout.flush()
            await leaving.wait()
            await engine.DrainReplica(rollout_pb2.DrainReplicaRequest(grace_s=options.grace_s), None)


def main() -> None:
    """Fork until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--token-s", type=float, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    options = parser.parse_args()
    log.configure(LogConfig(level="error"), service="simulated-engine")
    pids = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(live(options, json.loads(line)))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # still its own process id, because ended children were not reaped before
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
