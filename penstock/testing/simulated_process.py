"""Simulated engines in their own processes, which tests kill.

`python -m penstock.testing.simulated_process --help` lists the options; a process prints its address once it serves.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable

from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig, LogConfig
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.telemetry import log
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPrefill

_ROLES: dict[str, Callable[..., SimulatedEngine]] = {
    "unified": SimulatedEngine,
    "prefill": SimulatedPrefill,
    "decode": SimulatedDecode,
}
_START_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def simulated_process(
    bus: Bus,
    run: str,
    replica_id: str,
    *,
    role: str = "unified",
    delay_s: float = 0.0,
    token_s: float = 0.0,
    hang_after: int | None = None,
    die_after: int | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a simulated engine of `role` (unified, prefill, decode) during the context, unless it is killed earlier.

    The other settings are those of `SimulatedEngine`; a process that hangs does so until it is killed.
    """
    ends = {"--hang-after": hang_after, "--die-after": die_after}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, f"--url={bus.config.url}", f"--run={run}", f"--replica-id={replica_id}"),
        *(f"--role={role}", f"--delay-s={delay_s}", f"--token-s={token_s}"),
        f"--lease-ttl-s={bus.config.lease_ttl_s}",
        *(f"{option}={num_tokens}" for option, num_tokens in ends.items() if num_tokens is not None),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=dying_with_parent(),
    )
    assert process.stdout is not None
    try:
        started = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        # A waiting call may kill it before it can report that it has started.
        assert started or die_after is not None, "the engine did not start"
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the NATS server")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--role", choices=_ROLES, default="unified")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--hang-after", type=int, default=None)
    parser.add_argument("--die-after", type=int, default=None)
    parser.add_argument("--lease-ttl-s", type=float, default=1.0)
    options = parser.parse_args()
    log.configure(LogConfig(), service="simulated-engine")  # to standard error: standard output is for the address
    async with connect(BusConfig(url=options.url, lease_ttl_s=options.lease_ttl_s), run=options.run) as bus:
        engine = _ROLES[options.role](
            bus,
            replica_id=options.replica_id,
            delay_s=options.delay_s,
            token_s=options.token_s,
            hang_after=options.hang_after,
            die_after=options.die_after,
        )
        async with engine.running():
            sys.stdout.write(f"{engine.replica.address}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
