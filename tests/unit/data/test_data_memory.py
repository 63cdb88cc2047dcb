"""Data that is larger than memory, and lengths that are measured once."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from penstock.errors import DataError
from services.trainer.data import lengths
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset, open_lengths
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.opening import open_sources
from services.trainer.data.sources.readers.blocks import BlockCache
from services.trainer.data.sources.readers.parquet import ParquetTable


def write(file: Path, num_rows: int, *, row_group_size: int, filler: int = 0) -> Path:
    """Problems whose answer is their number."""
    numbers = [str(number) for number in range(num_rows)]
    problems = [f"{number}{'x' * filler}" for number in numbers]
    pq.write_table(pa.table({"problem": problems, "answer": numbers}), file, row_group_size=row_group_size)
    return file


def test_a_file_larger_than_memory_is_read_in_any_order(tmp_path: Path) -> None:
    """A million bytes through a tenth of that; what is held never exceeds the bound."""
    file = write(tmp_path / "a.parquet", 1000, row_group_size=20, filler=1000)
    blocks = BlockCache(100_000)
    table = ParquetTable(file, blocks)
    order = random.Random(0).sample(range(1000), 1000)
    held = []
    for number in order:
        assert table[number]["answer"] == str(number)
        held.append(blocks.num_bytes)
    assert file.stat().st_size < 1_000_000  # it compresses well: bytes are counted as they are in memory
    assert 60_000 < max(held) <= 100_000


def test_blocks_that_are_in_use_are_not_read_again() -> None:
    """What was used longest ago goes first."""
    blocks, read = BlockCache(30), []

    def block(key: str) -> pa.Table:
        read.append(key)
        return pa.table({"a": pa.array([0], pa.int64())})  # 8 bytes

    for key in ("a", "b", "c", "a", "d", "a", "b"):
        blocks.get(key, lambda key=key: block(key), num_bytes=8)
    assert read == ["a", "b", "c", "d", "b"]
    assert blocks.num_bytes == 24


def test_a_row_group_that_does_not_fit_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Before anything is decoded."""
    file = write(tmp_path / "a.parquet", 100, row_group_size=100, filler=1000)
    with pytest.raises(DataError, match=r"a row group of \d+ bytes, more than data\.memory_gib .*row_group_size=1000"):
        open_dataset(DataConfig(path=str(file), memory_gib=1e-7))


@pytest.mark.parametrize("suffix", ["json", "csv", "jsonl.gz"])
def test_files_that_are_held_as_a_whole_share_the_memory(tmp_path: Path, suffix: str) -> None:
    """Each fits, and all together do not; lines that are read one by one do."""
    rows = [{"problem": "x" * 1000, "answer": str(number)} for number in range(100)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    content = {
        "json": json.dumps(rows).encode(),
        "csv": ("problem,answer\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in rows)).encode(),
        "jsonl.gz": gzip.compress(lines.encode()),
    }[suffix]
    paths = tuple(str(tmp_path / f"{name}.{suffix}") for name in "abc")
    for path in paths:
        Path(path).write_bytes(content)
    memory_gib = 250_000 / 2**30  # two of them
    assert open_dataset(DataConfig(path=paths[:2], memory_gib=memory_gib)).num_rows == 200
    words = rf"c\.{suffix}' has .* as a whole, beside 2\d{{5}} bytes of other files; .*, or raise data\.memory_gib"
    with pytest.raises(DataError, match=words):
        open_dataset(DataConfig(path=paths, memory_gib=memory_gib))
    (tmp_path / "c.jsonl").write_text(lines)
    assert open_dataset(DataConfig(path=(*paths[:2], f"{tmp_path}/c.jsonl"), memory_gib=memory_gib)).num_rows == 300


def test_row_groups_have_the_memory_that_held_files_leave() -> None:
    """Those that were read before make room."""
    blocks = BlockCache(30)
    for key in ("a", "b", "c"):
        blocks.get(key, lambda: pa.table({"a": pa.array([0], pa.int64())}), num_bytes=8)
    blocks.hold(10)
    assert (blocks.num_bytes, blocks.num_free_bytes) == (16, 20)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    """The rows before it can be played."""
    file = write(tmp_path / "a.parquet", 30, row_group_size=10, filler=5000)
    content = bytearray(file.read_bytes())
    place = len(content) // 2
    content[place - 200 : place + 200] = b"\xff" * 400
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet', rows \d+ to \d+: .*; repair the file"):
        open_dataset(DataConfig(path=str(file)))


class Counting(PromptLimit):
    """A limit that measures characters, and counts how often."""

    def __init__(self, max_tokens: int, model: str = "m") -> None:
        self.max_tokens, self.model, self.num_measured = max_tokens, model, 0

    def num_tokens(self, example: object) -> int:
        self.num_measured += 1
        return len(example.messages[0].parts[0].text)  # type: ignore[attr-defined]


def test_lengths_are_measured_once(tmp_path: Path) -> None:
    """Another start, and another limit, read them; another file, setting or model measures again."""
    file = write(tmp_path / "a.parquet", lengths.MIN_KEPT_ROWS, row_group_size=100)
    config = DataConfig(path=str(file), cache_dir=tmp_path / "cache")

    def measurements(config: DataConfig, limit: Counting) -> int:
        open_dataset(config, limit=limit)
        return limit.num_measured

    assert measurements(config, Counting(2)) == lengths.MIN_KEPT_ROWS
    assert [measurements(config, Counting(limit)) for limit in (2, 1)] == [0, 0]
    assert measurements(config, Counting(2, model="other")) == lengths.MIN_KEPT_ROWS
    assert measurements(config.model_copy(update={"prompt_suffix": "!"}), Counting(9)) == lengths.MIN_KEPT_ROWS
    write(file, lengths.MIN_KEPT_ROWS + 1, row_group_size=100)
    assert measurements(config, Counting(2)) == lengths.MIN_KEPT_ROWS + 1


def test_a_row_known_to_be_too_long_is_passed_over_unread(tmp_path: Path) -> None:
    """And the same rows are passed over with and without the file."""
    file = write(tmp_path / "a.parquet", lengths.MIN_KEPT_ROWS, row_group_size=100)
    config = DataConfig(path=str(file), cache_dir=tmp_path / "cache")
    played = []
    for limit in (Counting(2), Counting(2)):
        dataset = open_dataset(config, seed=1, limit=limit)
        limit.num_measured = 0
        examples = [dataset.playable(position) for position in range(200)]
        played.append([each.golds if isinstance(each, Example) else each for each in examples])
        assert limit.num_measured == sum(isinstance(each, Example) for each in examples) < 100
    assert played[0] == played[1]


def flipped(content: bytes, place: int) -> bytes:
    """Content with all bits of one byte inverted."""
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"not a file of numbers", id="another file"),
        pytest.param(lambda content: content[: len(content) // 2], id="half of it"),
        pytest.param(lambda content: flipped(content, content.index(b"PK\x03\x04", 1) - 9), id="a byte of the numbers"),
        pytest.param(lambda content: flipped(content, content.index(b"PK\x01\x02") + 10), id="the compression method"),
    ],
)
def test_a_damaged_file_of_lengths_is_made_anew(tmp_path: Path, damaged: Callable[[bytes], bytes]) -> None:
    """A machine that was switched off leaves no run that cannot start."""
    config = DataConfig(
        path=str(write(tmp_path / "a.parquet", lengths.MIN_KEPT_ROWS, row_group_size=100)), cache_dir=tmp_path / "cache"
    )
    open_dataset(config, limit=Counting(9))
    (kept,) = (tmp_path / "cache" / "lengths").iterdir()
    kept.write_bytes(damaged(kept.read_bytes()))
    again = Counting(9)
    open_dataset(config, limit=again)
    assert again.num_measured == lengths.MIN_KEPT_ROWS


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    """It is said once, and the run starts."""
    (tmp_path / "cache").write_text("a file")
    config = DataConfig(
        path=str(write(tmp_path / "a.parquet", lengths.MIN_KEPT_ROWS, row_group_size=100)), cache_dir=tmp_path / "cache"
    )
    with structlog.testing.capture_logs() as logs:
        open_dataset(config, limit=Counting(9))
    assert [entry["event"] for entry in logs] == ["data.lengths_not_kept"]


def test_a_check_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    """It tells how far it is."""
    config = DataConfig(
        path=str(write(tmp_path / "a.parquet", lengths.MIN_KEPT_ROWS, row_group_size=100)), cache_dir=tmp_path / "cache"
    )
    told: list[tuple[str, int, int]] = []
    for max_rows in (10, 25):
        limit, sources = Counting(9), open_sources(config)
        dataset = Dataset(
            sources, config, seed=0, limit=limit, lengths=open_lengths(sources, tmp_path / "cache", limit)
        )
        dataset.check(max_rows=max_rows, on_progress=lambda *progress: told.append(progress))
    assert told == [("", done, 10) for done in range(1, 11)] + [("", done, 15) for done in range(1, 16)]
