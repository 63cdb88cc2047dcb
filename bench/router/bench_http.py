"""Times requests to running HTTP servers, each on a fresh connection and on one that is kept alive.

    python bench/router/bench_http.py http://127.0.0.1:7003/healthz http://127.0.0.1:8000/v1/models

`PENSTOCK_TOKEN` is sent if it is set. -n sets the number of requests.
"""

import argparse
import http.client
import os
import statistics
import sys
import time
from urllib.parse import urlsplit

COLUMNS = ("url", "connection", "p50 ms", "p99 ms")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("-n", "--num-requests", type=int, default=200)
    arguments = parser.parse_args()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for url in arguments.urls:
        for kind, is_kept in (("fresh", False), ("kept alive", True)):
            times_ms = sorted(measure(url, arguments.num_requests, is_kept=is_kept))
            p99_ms = statistics.quantiles(times_ms, n=100)[98]
            sys.stdout.write(f"| {url} | {kind} | {statistics.median(times_ms):.2f} | {p99_ms:.2f} |\n")


def measure(url: str, num_requests: int, *, is_kept: bool) -> list[float]:
    """Return milliseconds from each request to the end of the answer, connecting included."""
    address = urlsplit(url)
    assert address.hostname is not None
    headers = {"Authorization": f"Bearer {token}"} if (token := os.environ.get("PENSTOCK_TOKEN")) else {}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    times_ms = []
    for _ in range(num_requests):
        started = time.perf_counter()
        connection.request("GET", address.path or "/", headers=headers)
        response = connection.getresponse()
        response.read()
        times_ms.append((time.perf_counter() - started) * 1000)
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status} {response.reason}")
        if not is_kept:
            connection.close()
    connection.close()
    return times_ms


if __name__ == "__main__":
    main()
