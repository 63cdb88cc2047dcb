"""Processes are started beside gRPC's threads."""

import subprocess
import sys

_PROGRAM = """
import asyncio, sys
import services
import grpc.aio
from penstock.rpc.channel import connect
from penstock.rpc.server import RpcServer
from penstock.runtime.children.parent_death import dying_with_parent

async def main():
    server = RpcServer(host="127.0.0.1", port=0)
    await server.start()
    async with connect(server.address) as channel:
        await channel.channel_ready()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", preexec_fn=dying_with_parent())
        assert await process.wait() == 0
    await server.drain(0.0)

asyncio.run(main())
"""


def test_grpc_does_nothing_between_fork_and_exec() -> None:
    """It would start its threads in the child, which aborts when their files are closed under them, as `exec` does."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr
