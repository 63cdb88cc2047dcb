"""The process that worker processes are forked from, with math-verify imported and warm.

    python -m services.reward.isolation.forkserver SETTINGS WORKERS

The arguments are JSON: `penstock.runtime.isolation.forkserver_protocol.ForkserverSettings`, and `WorkerSettings`.
"""

import sys

import msgspec

from penstock.runtime.isolation.forkserver import serve
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask, WorkerSettings
from services.reward.isolation.worker import work
from services.reward.worker_tasks.perform import perform, prepare


def main() -> None:
    """Fork workers until the server ends."""
    settings = msgspec.json.decode(sys.argv[2], type=WorkerSettings)

    def load() -> None:
        prepare(settings.verifiers)
        _warm_up()

    serve(
        sys.argv[1],
        prepare=load,
        work=lambda fd, is_confined: work(fd, settings.memory_limit_bytes, is_confined=is_confined),
    )


def _warm_up() -> None:
    """Fill the parser's caches, which every worker then inherits."""
    for latex in (r"\frac{8\sqrt{3}}{3}", r"2 \pi", "(3, -2)", "x^2+2x+1", "5, 7", "[1, 2)", "y=2x+1", r"\sin{2x}"):
        gold = SymbolicGold(text=latex, use_text=False, value="", tolerance="0")
        perform(SymbolicTask(golds=(gold,), body=f"1 + {latex}", text=latex))


if __name__ == "__main__":
    main()
