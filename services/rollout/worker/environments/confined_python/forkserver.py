"""The process that code's processes are forked from; it has imported what code may import.

    python -m services.rollout.worker.environments.confined_python.forkserver SETTINGS WORKERS

The arguments are JSON: `penstock.runtime.isolation.forkserver_protocol.ForkserverSettings`, and `InterpreterSettings`.
"""

import importlib
import math
import os
import resource
import sys

import msgspec

from penstock.runtime.isolation import sandbox
from penstock.runtime.isolation.forkserver import serve
from penstock.runtime.isolation.frames import HEADER, frame, write_all
from penstock.runtime.isolation.limits import address_space_bytes, limit_process, lower
from services.rollout.worker.environments.confined_python.execution import run
from services.rollout.worker.environments.confined_python.messages import Code, InterpreterSettings


def main() -> None:
    """Fork processes until the worker ends."""
    settings = msgspec.json.decode(sys.argv[2], type=InterpreterSettings)

    def load() -> None:
        for name in settings.modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a boundary: importing a module runs other people's code
                raise ImportError(
                    f"module {name} of modules cannot be imported ({type(error).__name__}: {error}); install it where "
                    "workers run, or leave it out"
                ) from error

    serve(sys.argv[1], prepare=load, work=lambda fd, is_confined: _work(fd, settings, is_confined=is_confined))


def _work(fd: int, settings: InterpreterSettings, *, is_confined: bool) -> None:
    """Run the one piece of code that the socket brings."""
    if not is_confined:
        raise RuntimeError("code of a policy never runs unconfined")
    limit_process(memory_bytes=address_space_bytes() + settings.memory_limit_mb * 2**20)
    lower(resource.RLIMIT_CPU, math.ceil(settings.time_limit_s) + 1)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # like Python's own generator, whose state would be the same in every fork
    sandbox.enter(is_strict=True)
    (size_bytes,) = HEADER.unpack(_read(fd, HEADER.size))
    code = msgspec.msgpack.decode(_read(fd, size_bytes), type=Code)
    run(
        code.source,
        max_characters=settings.max_characters,
        modules=settings.modules,
        report=lambda report: write_all(fd, frame(report)),
    )


def _read(fd: int, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = os.read(fd, size_bytes - len(data))
        if not piece:
            raise EOFError("the worker is gone")
        data += piece
    return data


if __name__ == "__main__":
    main()
