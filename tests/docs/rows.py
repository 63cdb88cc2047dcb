"""`python -m tests.docs.rows FILE...` writes rows as Geometry3K has them, which pages take for granted."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.trainer.data.geometry import GeometryDataset

NUM_ROWS = 256
"""More than the evaluation sets of the tiny recipe take."""


def write_rows(file: Path, seed: int) -> None:
    """Drawn problems, each with its picture."""
    drawn = GeometryDataset(NUM_ROWS, seed=seed)
    pq.write_table(pa.Table.from_pylist([drawn[index] for index in range(NUM_ROWS)]), file)


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[1:]):
        write_rows(Path(name), seed=number)
