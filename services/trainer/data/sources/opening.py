"""Opens sources: the files that the settings name, as tables whose rows become examples."""

import os
from pathlib import Path
from typing import Final

from services.trainer.data.config import DataConfig, SourceConfig
from services.trainer.data.geometry import GeometryDataset, Pictures
from services.trainer.data.geometry_sheets import GeometrySheets
from services.trainer.data.rows.images import ImageReader
from services.trainer.data.sources.files import Files, find_files
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.readers.formats import open_table
from services.trainer.data.sources.source import DEMONSTRATIONS, PROMPTS, NamedTable, RowForm, Source
from services.trainer.data.sources.table import Slice, Table

NUM_BUILT_IN_ROWS: Final = 10_000
"""Rows in an epoch of the built-in problems: more than there are different pictures of a coordinate, few enough to draw
an order of rows in a millisecond."""
BUILT_IN_SEED: Final = 0
"""The built-in problems are the same in every run, so that runs can be compared; run.seed changes their order."""


def open_sources(config: DataConfig, *, form: RowForm = PROMPTS) -> dict[str, Source]:
    """Open every source, by name.

    Args:
        config: Which data, and how to read it.
        form: What rows are read as.

    Raises:
        DataError: a file is missing or invalid, or lacks a column.
        UnavailableError: the Hugging Face Hub cannot be reached, and its cache has no copy.
    """
    blocks = BlockCache(int(config.memory_gib * 2**30))
    folder = cache_folder(config)
    return {name: _open(name, source, blocks, folder, form) for name, source in config.by_name.items()}


def built_in(
    config: SourceConfig,
    *,
    num_rows: int = NUM_BUILT_IN_ROWS,
    seed: int = BUILT_IN_SEED,
    pictures: Pictures = "training",
    form: RowForm = PROMPTS,
) -> Source:
    """Return the built-in geometry problems, which are drawn when they are read.

    Args:
        config: Kinds of problem, and how rows are read.
        num_rows: Rows of an epoch.
        seed: Seed of the draws.
        pictures: Which pictures to draw from; training never draws held-out ones.
        form: What rows are read as.
    """
    name = "the built-in data set"
    drawn = GeometryDataset(num_rows, seed=seed, kinds=config.kinds, pictures=pictures)
    table: Table = drawn
    if config.sheet_cells > 1:
        table = GeometrySheets(
            drawn,
            num_cells=config.sheet_cells,
            demonstrations=form is DEMONSTRATIONS,
            unzoomed=config.unzoomed,
            misaimed=config.misaimed,
        )
    rows = NamedTable(table=table, name=name, images=ImageReader(folder=Path()), form=form)
    return Source(name, [rows], config)


def cache_folder(config: DataConfig) -> Path:
    """Return the folder for prompt lengths and downloaded images."""
    if config.cache_dir is not None:
        return config.cache_dir
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"


def _open(name: str, config: SourceConfig, blocks: BlockCache, folder: Path, form: RowForm) -> Source:
    if not config.paths:
        return built_in(config, form=form)
    tables = [table for files in find_files(config) for table in _tables(files, config, blocks, folder, form)]
    shown = ", ".join(config.paths)
    return Source(f"data.sources.{name}.path {shown!r}" if name else f"data.path {shown!r}", tables, config)


def _tables(files: Files, config: SourceConfig, blocks: BlockCache, folder: Path, form: RowForm) -> list[NamedTable]:
    tables = []
    first = 0
    opened = [(file, open_table(file, blocks)) for file in files.files]
    wanted = range(sum(len(table) for _, table in opened))[files.rows]
    for file, table in opened:
        rows = range(max(wanted.start - first, 0), min(wanted.stop - first, len(table)))
        first += len(table)
        if len(rows):
            images = ImageReader(
                folder=config.image_folder or file.parent,
                downloads=folder / "images" if config.image_urls else None,
                min_pixels=config.min_pixels,
                max_pixels=config.max_pixels,
            )
            part: Table = table if len(rows) == len(table) else Slice(table, rows)
            tables.append(
                NamedTable(
                    table=part,
                    name=f"data.path {str(file)!r}",
                    images=images,
                    first_row=rows.start,
                    stamp=_stamp(file, rows),
                    form=form,
                )
            )
    return tables


def _stamp(file: Path, rows: range) -> str:
    status = file.stat()
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {rows.start} {rows.stop}"
