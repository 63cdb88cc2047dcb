"""runc, without the limits that podman asks for: `python runtime.py ARGUMENT...`.

Podman 4.3 gives every container of root 1,048,576 open files. Where a hard limit is lower, as in many containers, a
runtime may not raise it and starts nothing. Without a limit of its own a container has its starter's. It is runc, as
for Docker, because crun takes no host on which both versions of cgroups have controllers.
"""

import json
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Become runc, after taking the limits out of the specification that it reads."""
    if "create" in arguments:
        forget(Path(_value_of(arguments, "--bundle")) / "config.json")
    if "exec" in arguments:
        forget(Path(_value_of(arguments, "--process")))
    os.execvp("runc", ["runc", *arguments])


def forget(file: Path) -> None:
    """Remove the limits from a specification of OCI, or from that of one process."""
    specification = json.loads(file.read_text())
    specification.get("process", specification).pop("rlimits", None)
    file.write_text(json.dumps(specification))


def _value_of(arguments: list[str], option: str) -> str:
    for number, argument in enumerate(arguments):
        if argument == option:
            return arguments[number + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    raise ValueError(f"no {option} in {arguments}")


if __name__ == "__main__":
    main(sys.argv[1:])
