"""What a launcher starts for each planned process: its command, environment and address, and when it is ready."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from penstock.bus.local_server import server_command
from penstock.runtime.security import NATS_TOKEN, Security
from services.launch.process.readiness import serves_grpc, serves_nats
from services.launch.process.spec import ProcessSpec
from services.launch.run_folder import RunFolder
from services.launch.run_plan import PlannedProcess, RunPlan


def process_specs(plan: RunPlan, folder: RunFolder, security: Security) -> list[ProcessSpec]:
    """Return the specs of the processes of `plan` on this machine; `security` is required by their servers."""
    environment = child_environment(has_gpu=bool(plan.gpus.devices))

    def environment_of(process: PlannedProcess) -> dict[str, str]:
        return environment if process.service == "nats" else {**environment, **plan.gpus.environment(process.name)}

    return specs_of(plan.processes, folder, security, environment_of)


def specs_of(
    processes: Sequence[PlannedProcess],
    folder: RunFolder,
    security: Security,
    environment_of: Callable[[PlannedProcess], Mapping[str, str]],
) -> list[ProcessSpec]:
    """Return the specs of planned processes with these environments; `security` is required by their servers."""
    return [
        (_nats_spec if process.service == "nats" else _service_spec)(process, folder, environment_of(process), security)
        for process in processes
    ]


def child_environment(*, has_gpu: bool) -> dict[str, str]:
    """Return the processes' environment: this one's, with one computing thread each on a CPU, unless set already.

    Several processes whose OpenMP threads wait for each other on few cores nearly stall.
    """
    on_cpu = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    return {**({} if has_gpu else on_cpu), **os.environ}


def _nats_spec(
    process: PlannedProcess, folder: RunFolder, environment: Mapping[str, str], security: Security
) -> ProcessSpec:
    host, _, port = process.address.rpartition(":")
    command = server_command(folder.nats.absolute(), host=host, port=int(port), security=security)
    security.tell_if_open(host, process.address, secret=NATS_TOKEN)
    return ProcessSpec(
        name=process.name,
        service=process.service,
        command=command.arguments,
        environment={**environment, **command.environment},
        phase=process.phase,
        address=process.address,
        is_ready=serves_nats,
    )


def _service_spec(
    process: PlannedProcess, folder: RunFolder, environment: Mapping[str, str], security: Security
) -> ProcessSpec:
    error_file = folder.logs / f"{process.name}.error.json"
    serve = [sys.executable, "-P", "-m", "services.cli", "serve", process.service, "--config", str(folder.live_file)]
    return ProcessSpec(
        name=process.name,
        service=process.service,
        command=[*serve, "--name", process.name, "--error-file", str(error_file), *process.overrides],
        environment=environment,
        phase=process.phase,
        ends_run=process.ends_run,
        address=process.address,
        port_key=process.port_key,
        is_ready=functools.partial(serves_grpc, security=security),
        recipe_file=folder.live_file,
        error_file=error_file,
    )
