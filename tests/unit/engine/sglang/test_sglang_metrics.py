"""SGLang's metrics are kept in files with room on the disk, ours in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_MEASURE = """
import asyncio, json, sys
from pathlib import Path
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from services.rollout.engine.sglang.metrics import SglangMetrics

registry = CollectorRegistry()
ours = Counter("penstock_test_pushes", "Pushes.", ["outcome"], registry=registry)
theirs = SglangMetrics.keep_in_files(Path(sys.argv[1]))
ours.labels("received").inc(3)
latency = Histogram("sglang:latency", "Latency.", ["model"], registry=CollectorRegistry())
latency.labels("tiny").observe(1.0)
files = [path.name.split("_")[0] for path in Path(sys.argv[1]).iterdir()]
read = [metric.name for metric in asyncio.run(theirs.read())]
print(json.dumps([files, read, generate_latest(registry).decode()]))
"""

_FILL = """
import json, os, sys
from pathlib import Path
from sglang.srt.plugins.hook_registry import HookRegistry
from services.rollout.engine.sglang_plugin import metric_files

metric_files.register()
HookRegistry.apply_hooks()
from prometheus_client import CollectorRegistry, Counter

counter = Counter("sglang:requests", "Requests.", ["model"], registry=CollectorRegistry())
seen = []
for number in range(800):
    counter.labels(f"model-{number}").inc(number)
    [file] = Path(sys.argv[1]).iterdir()
    state = file.stat()
    seen.append((state.st_size, state.st_blocks * 512))
from prometheus_client.mmap_dict import MmapedDict
print(json.dumps([seen, [value for _, value, _, _ in MmapedDict.read_all_values_from_file(file)]]))
"""


def measured(code: str, folder: Path, **environment: str) -> Any:
    """What the code prints in a process of its own: what it changes of prometheus_client would stay."""
    command = (sys.executable, "-c", code, str(folder))
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_only_sglang_s_metrics_are_kept_in_files(tmp_path: Path) -> None:
    """Also where labels of ours are first used after SGLang's start, as those of pushes are."""
    files, read, page = measured(_MEASURE, tmp_path / "metrics")
    assert files == ["histogram"]
    assert read == ["sglang:latency"]
    assert 'penstock_test_pushes_total{outcome="received"} 3.0' in page


@pytest.mark.slow
def test_files_have_all_their_blocks(tmp_path: Path) -> None:
    """New and grown: on a full disk, a write to a block that is not there ends the process by SIGBUS."""
    seen, values = measured(_FILL, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert all(reserved >= size for size, reserved in seen)
    assert {size for size, _ in seen} == {1 << 16, 1 << 17}
    assert values == list(range(800))
