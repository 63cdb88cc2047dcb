"""A run whose processes are small Python programs: `python launcher_process.py <folder> <specs as JSON>`.

Each spec is {"name", "program", "phase", "ends_run"}. The folder is the working directory of the programs; the program
`name` writes the error that ends it to `name.error.json`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.runtime import process
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.supervisor import supervised
from services.launch.terminal.lasting_output import lasting_output


def main() -> int:
    """The exit code of `penstock train`."""
    folder, specs = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.chdir(folder)
    options = json.loads(sys.argv[3])
    processes = [
        ProcessSpec(
            name=spec["name"],
            command=[sys.executable, "-c", spec["program"]],
            environment=dict(os.environ),
            phase=StopPhase[spec.get("phase", "SERVE")],
            ends_run=spec.get("ends_run", False),
            error_file=folder / f"{spec['name']}.error.json",
        )
        for spec in specs
    ]

    def report(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def run(stop: asyncio.Event) -> None:
        trace = ProcessTrace(folder)
        starting = supervised(processes, logs=folder, report=report, first_backoff_s=0.05, trace=trace, **options)
        async with starting as supervisor:
            try:
                for spec in processes:
                    supervisor.start(spec.name)
                await supervisor.wait(stop)
            finally:
                await supervisor.stop()  # inside the context, as the launcher does, which shows what is waited for

    try:
        with lasting_output():
            return process.run(run)
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
