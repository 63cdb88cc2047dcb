"""Runs one bus, one router, workers and a trainer around simulated engines, and measures what each process uses.

All but the engines and the optimizer step are the real processes, started as `penstock serve` starts them. Engines, up
to thousands of them, share a few processes; each has its own port, lease and connection to nats-server, takes real
pushes, and sends tokens as a real one does.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.async_loop.measured_loop import LoopError, Watch, recipe_of, serving, until_serving
from bench.scale.saturation import Use
from bench.scale.workload import MAX_STALENESS, SAMPLES_PER_GROUP, Load, mean_tokens
from penstock import config as configuration
from penstock.bus.local_server import local_server
from penstock.clients import RouterClient
from penstock.config import BusConfig
from penstock.errors import PenstockError
from penstock.runtime.ports import free_ports
from penstock.runtime.process import beside
from services.recipe import Recipe

ENGINES = "engines (simulated)"
NATS, ROUTER, WORKERS, TRAINER = "nats-server", "router", "workers", "trainer"
_LOOK_S = 0.5
_SETTLE_S = 2.0
"""Seconds after the last process has started, before anything is measured."""
_LISTING_S = 0.5
"""Seconds between listings. An engine whose lease lapsed is listed again once it renews it, after 1.7 s or less."""
_TIMEOUT_S = 300.0
_PROMPT_TOKENS = 1024
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One number of engines."""

    load: Load
    groups_per_s: float
    offered_groups_per_s: float
    """The same of these steps if nothing but the engines took time."""
    tokens_per_s: float
    bus_read_mb_per_s: float
    """What nats-server read from its connections and files, in 1e6 bytes a second."""
    bus_written_mb_per_s: float
    """What it wrote to its connections and files."""
    uses: Mapping[str, Use]
    """By process; the engines are among them."""
    memory_mib: Mapping[str, float]
    """Proportional set size at the end, of each process or of all together."""
    num_descriptors: Mapping[str, int]
    """Open files and connections, of the process that has most."""
    push_s: float
    """Mean seconds of a push to all engines."""
    fewest_replicas: int
    """The fewest engines that the router listed, asked twice a second from the idle seconds to the last step."""
    num_steps: int


async def run(load: Load, folder: Path, *, idle_s: float, num_warmup: int, num_steps: int) -> Measured:
    """Train `num_steps` steps in `folder` beyond `num_warmup`; before the first, be idle for `idle_s` seconds.

    Raises:
        LoopError: a process ended, or did not do its part in time.
    """
    folder.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
    scenario, steps_file = load.scenario(), folder / "steps.jsonl"
    scenario.workload.write(folder / "workload.json")
    steps_file.touch()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(local_server(folder / "nats"))
        [nats] = [each for each in psutil.Process().children() if str(folder / "nats" / "nats.conf") in each.cmdline()]
        settings = _recipe_of(load, folder, BusConfig(url=url))
        (folder / "recipe.toml").write_text(configuration.dump(settings))
        config = ("--config", folder / "recipe.toml")
        simulated = (*config, "--workload", folder / "workload.json")
        engines = []
        for number, first, count in _shares(load.replicas, load.num_engine_processes):
            size = ("--first", first, "--replicas", count, "--slots", scenario.slots_per_replica, "--own-connections")
            module = "bench.async_loop.engines_process"
            engines.append(
                await stack.enter_async_context(serving(folder, f"engines-{number}", module, *simulated, *size))
            )
        pids: dict[str, list[int]] = {
            NATS: [nats.pid],
            ENGINES: [each.pid for each in engines],
            ROUTER: [],
            WORKERS: [],
            TRAINER: [],
        }

        async def start(kind: str, name: str, module: str, *arguments: object) -> None:
            process = await stack.enter_async_context(serving(folder, name, module, *arguments))
            pids[kind].append(process.pid)

        for process in engines:
            await until_serving(process, folder)
        await start(ROUTER, "router", "services.cli", "serve", "router", *config)
        ports = free_ports(load.num_workers)
        for number, port in enumerate(ports):
            named = ("--name", f"worker-{number}", f"--worker.port={port}")
            await start(WORKERS, f"worker-{number}", "services.cli", "serve", "worker", *config, *named)
        router = await stack.enter_async_context(RouterClient(f"127.0.0.1:{settings.router.port}"))
        await _until_listed(router, load.replicas)
        await _until_listening(ports)
        await asyncio.sleep(_SETTLE_S)
        listed: list[int] = []
        # In idle seconds too, so that its cost is not taken for that of groups.
        await stack.enter_async_context(beside(list_again_and_again(router, listed)))
        idle = await _idle_cores(pids, idle_s)
        await start(TRAINER, "trainer", "bench.async_loop.trainer_process", *simulated, "--steps-file", steps_file)
        parts = {f"{kind} {n}": pid for kind, of_kind in pids.items() for n, pid in enumerate(of_kind)}
        watch = Watch(folder, steps_file, parts)
        await watch.until(num_warmup, timeout_s=_TIMEOUT_S + num_warmup * _step_s(load))
        began, before, io_before = time.monotonic(), _cpu_s(pids), nats.io_counters()
        await watch.until(num_warmup + num_steps, timeout_s=_TIMEOUT_S + num_steps * _step_s(load))
        # The file of steps was looked at a moment after the last of them ended.
        elapsed_s, after, io_after = time.monotonic() - began, _cpu_s(pids), nats.io_counters()
        memory = {kind: sum(psutil.Process(pid).memory_full_info().pss for pid in of) for kind, of in pids.items()}
        descriptors = {kind: max(psutil.Process(pid).num_fds() for pid in of) for kind, of in pids.items()}
        ends = watch.ends()
    groups_per_s = num_steps * load.groups_per_step / (ends[num_warmup + num_steps - 1] - ends[num_warmup - 1])
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    pushes = [row["push_s"] for row in rows if num_warmup < row["step"] <= num_warmup + num_steps]
    counted = range(num_warmup * load.groups_per_step, (num_warmup + num_steps) * load.groups_per_step)
    return Measured(
        load=load,
        groups_per_s=groups_per_s,
        offered_groups_per_s=load.best_groups_per_s(num_warmup=num_warmup, num_steps=num_steps),
        tokens_per_s=groups_per_s * SAMPLES_PER_GROUP * mean_tokens(scenario.workload, counted),
        bus_read_mb_per_s=(io_after.read_chars - io_before.read_chars) / elapsed_s / 1e6,
        bus_written_mb_per_s=(io_after.write_chars - io_before.write_chars) / elapsed_s / 1e6,
        uses={
            kind: Use(
                idle_cores=idle.get(kind, 0.0),
                cores=(after[kind] - before[kind]) / elapsed_s,
                num_processes=len(of),
            )
            for kind, of in pids.items()
        },
        memory_mib={kind: pss / _MIB for kind, pss in memory.items()},
        num_descriptors=descriptors,
        push_s=sum(pushes) / max(1, len(pushes)),
        fewest_replicas=fewest(listed),
        num_steps=num_steps,
    )


def _recipe_of(load: Load, folder: Path, bus: BusConfig) -> Recipe:
    recipe = recipe_of(
        load.scenario(),
        folder,
        bus,
        max_staleness=MAX_STALENESS,
        run_name="scale",
        micro_batch_tokens=_PROMPT_TOKENS + load.max_tokens,
    )
    rollout = recipe.rollout.model_copy(update={"context_length": _PROMPT_TOKENS + load.max_tokens})
    return recipe.model_copy(update={"rollout": rollout})


def _shares(num: int, num_parts: int) -> list[tuple[int, int, int]]:
    """Return number, first and size of each part of `num` engines."""
    bounds = [num * part // num_parts for part in range(num_parts + 1)]
    return [(part, bounds[part], bounds[part + 1] - bounds[part]) for part in range(num_parts)]


def _step_s(load: Load) -> float:
    return load.groups_per_step * SAMPLES_PER_GROUP / load.samples_per_s


async def _until_listed(router: RouterClient, num_replicas: int) -> None:
    """Wait until the router lists all engines."""
    num_listed = -1
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while num_listed < num_replicas:
                await asyncio.sleep(1.0)
                with contextlib.suppress(PenstockError):
                    num_listed = len((await router.list_replicas(timeout_s=30.0)).replicas)
    except TimeoutError:
        raise LoopError(f"the router lists {num_listed} of {num_replicas} engines after {_TIMEOUT_S:g} s") from None


async def list_again_and_again(router: RouterClient, listed: list[int]) -> None:
    """Note how many engines the router lists, and 0 when it does not answer."""
    while True:
        try:
            listed.append(len((await router.list_replicas(timeout_s=30.0)).replicas))
        except PenstockError:
            listed.append(0)
        await asyncio.sleep(_LISTING_S)


def fewest(listed: Sequence[int]) -> int:
    """Return the fewest engines that were listed.

    Raises:
        LoopError: none were ever asked for.
    """
    if not listed:
        raise LoopError("the router never answered how many engines it lists")
    return min(listed)


def _cpu_s(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """Return user and system time so far, by kind of process."""
    times = {kind: [psutil.Process(pid).cpu_times() for pid in of_kind] for kind, of_kind in pids.items()}
    return {kind: sum(each.user + each.system for each in of_kind) for kind, of_kind in times.items()}


async def _until_listening(ports: list[int]) -> None:
    """Wait until something listens at each port."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            for port in ports:
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        break
                    await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise LoopError(f"the workers are still starting after {_TIMEOUT_S:g} s") from None


async def _idle_cores(pids: Mapping[str, list[int]], seconds: float) -> dict[str, float]:
    """Return the cores that each kind of process uses while nothing is played."""
    began, before = time.monotonic(), _cpu_s(pids)
    await asyncio.sleep(seconds)
    elapsed_s, after = time.monotonic() - began, _cpu_s(pids)
    return {kind: (after[kind] - before[kind]) / elapsed_s for kind in pids}
