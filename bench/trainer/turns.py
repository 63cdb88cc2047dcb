"""How a subject of `bench_trainer.py` takes its steps in turn with the others.

Its process takes a step for each line that it reads, and answers with one line of JSON. Without a turn it waits for
input, which takes no processor time. TRL's environment runs this too, so it imports only the standard library.
"""

import json
import resource
import sys
import time


class Turns:
    """Measures each step of this process."""

    def __init__(self) -> None:
        """Keep the standard output for answers; what libraries print goes to the standard error."""
        self._answers, sys.stdout = sys.stdout, sys.stderr
        self._started = self._cores_started = 0.0

    def begin(self) -> None:
        """Wait for the next turn, and end the process if there is none."""
        if not sys.stdin.readline():
            sys.exit()
        self._started, self._cores_started = time.perf_counter(), time.process_time()

    def end(self, **found: object) -> None:
        """Answer with what the step took, and with `found`."""
        answer = {
            "seconds": time.perf_counter() - self._started,
            "core_seconds": time.process_time() - self._cores_started,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self._answers.write(json.dumps(answer | found) + "\n")
        self._answers.flush()
