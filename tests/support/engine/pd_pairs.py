"""A prefill and a decode engine for tests, and the part of a router that plays requests with them."""

import asyncio
import dataclasses
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from penstock.clients.resumable import ResumableTurn
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.testing.engine_process import EngineProcess, engine_process
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference
from tests.support.leftovers import for_the_session

Stream = AsyncIterator[generate_pb2.GenerateChunk]


@dataclasses.dataclass
class Pair:
    """A prefill and a decode engine that hold the same policy."""

    prefill: EngineProcess
    decode: EngineProcess
    policy: Reference

    @property
    def engines(self) -> tuple[EngineProcess, EngineProcess]:
        """Both."""
        return self.prefill, self.decode

    async def version(self) -> int:
        """The policy version that both hold."""
        (version,) = {(await engine.replica()).policy_version for engine in self.engines}
        return version

    async def push(self, policy: Reference, *, version: int | None = None, **options: object) -> int:
        """Push `policy` to both, one after the other; its version."""
        version = await self.version() + 1 if version is None else version
        for engine in self.engines:
            await Push(engine, policy.weights, version, **options).complete()  # type: ignore[arg-type]
        self.policy = policy
        return version

    async def bootstrapped(
        self, request: generate_pb2.GenerateRequest, *, version: int | None = None
    ) -> generate_pb2.GenerateRequest:
        """`request` as both peers get it."""
        where = (await self.prefill.replica()).disaggregation
        given = generate_pb2.GenerateRequest()
        given.CopyFrom(request)
        given.bootstrap.CopyFrom(
            generate_pb2.Bootstrap(
                host=where.bootstrap_host,
                port=where.bootstrap_port,
                room=random.SystemRandom().randrange(1, 1 << 62),
                policy_version=await self.version() if version is None else version,
            )
        )
        return given

    async def generate(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        """Play the turn, both peers unary."""
        given = await self.bootstrapped(request)
        _, answer = await asyncio.gather(*(engine.generation.Generate(given, timeout=60) for engine in self.engines))
        return answer

    async def play(self, continuation: ResumableTurn, *, version: int | None = None) -> None:
        """Play one attempt at a turn; what was delivered is in `continuation`, whatever becomes of the rest."""
        given = await self.bootstrapped(continuation.remaining(), version=version)
        prefilling = asyncio.ensure_future(self.prefill.generation.Generate(given, timeout=60))
        decoding = self.decode.generation.GenerateStream(given, timeout=60)
        prefilling.add_done_callback(lambda call: decoding.cancel() if _has_failed(call) else None)
        try:
            async for chunk in decoding:
                continuation.add(chunk)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if _has_failed(prefilling):
                await prefilling  # which is why its peer was cancelled
            raise
        finally:
            prefilling.cancel()


def _has_failed(call: "asyncio.Future[object]") -> bool:
    return call.done() and not call.cancelled() and call.exception() is not None


class PairHost:
    """Keeps a pair for many tests, also for those that kill one of its engines."""

    def __init__(self, start: Callable[[str], Awaitable[EngineProcess]], reference: Reference) -> None:
        self._start = start
        self._reference = reference
        self._engines: dict[str, EngineProcess] = {}

    async def pair(self) -> Pair:
        """The pair, with a policy of its own; what is missing of it is started."""
        missing = [
            role
            for role in ("prefill", "decode")
            if role not in self._engines or self._engines[role].process.returncode is not None
        ]
        with for_the_session():
            started = await asyncio.gather(*(self._start(role) for role in missing), return_exceptions=True)
        self._engines |= {
            role: engine for role, engine in zip(missing, started, strict=True) if isinstance(engine, EngineProcess)
        }
        if failures := [engine for engine in started if isinstance(engine, BaseException)]:
            raise failures[0]
        pair = Pair(self._engines["prefill"], self._engines["decode"], self._reference)
        versions = [(await engine.replica()).policy_version for engine in pair.engines]
        await pair.push(self._reference.perturbed(seed=random.randrange(1 << 30)), version=max(versions) + 1)
        return pair


def missing_for_pairs(backend: str) -> str:
    """What this machine lacks to carry KV from engine to engine, and how to install it; empty if nothing."""
    code = (
        "import sys\n"
        "from penstock.errors import SetupError\n"
        "from services.rollout.engine.config import RolloutConfig\n"
        "from services.rollout.engine.disaggregation import require_transfer_backend\n"
        "config = RolloutConfig(role='decode', transfer_backend=sys.argv[1])\n"
        "try: require_transfer_backend(config, cuda=False)\n"
        "except SetupError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, backend]
    # Not in this process: what is loaded here stays here.
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@asynccontextmanager
async def pair_host(
    model_path: Path, nats_url: str, folder: Path, run: str, reference: Reference, **rollout: object
) -> AsyncIterator[PairHost]:
    """Hosts pairs of the run `run` during the context."""
    async with AsyncExitStack() as stack:

        async def start(role: str) -> EngineProcess:
            own = folder / f"{role}-{random.randrange(1 << 30)}" / run
            own.mkdir(parents=True)
            return await stack.enter_async_context(engine_process(model_path, nats_url, own, role=role, **rollout))

        yield PairHost(start, reference)


def is_ready(replica: common_pb2.Replica) -> bool:
    """Whether it takes requests."""
    return replica.state == common_pb2.REPLICA_STATE_READY
