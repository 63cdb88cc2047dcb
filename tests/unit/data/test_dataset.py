"""Data sets: layouts, order, and what is said about a file that is wrong."""

import base64
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from penstock.errors import ConfigError, DataError, PromptTooLongError
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, TextPart
from penstock.v1 import generate_pb2
from services.rollout.engine.prompt import PromptChecker
from services.trainer.admission.filters import FilterReason
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset, row_at
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.data.rows.example import Example
from services.trainer.data.sources.opening import built_in
from tests.support.trainer.data.pictures import png


def write(path: Path, columns: dict[str, list[object]]) -> str:
    """Write a Parquet file and return its path."""
    pq.write_table(pa.table(columns), path)
    return str(path)


def one_row(config: DataConfig) -> tuple[tuple[object, ...], tuple[bytes, ...], tuple[str, ...]]:
    """Parts of the only message, images and golds of the first row."""
    row = open_dataset(config)[0]
    assert [message.role for message in row.messages] == ["user"]
    return row.messages[0].parts, row.images, row.golds


def test_reads_hiyougas_schema_as_it_is(tmp_path: Path) -> None:
    r"""Text keeps its \r\n, pictures keep their bytes, palette or not, the mark becomes a part."""
    picture = png(mode="P")
    path = write(
        tmp_path / "a.parquet",
        {
            "images": [[{"bytes": picture, "path": "x.png"}]],
            "problem": ["<image>Find x.\r\nRound."],
            "answer": [r"3 \sqrt{2}"],
        },
    )
    parts, images, golds = one_row(DataConfig(path=path, prompt_suffix="\nBox it."))
    assert parts == (ImagePart(index=0), TextPart(text="Find x.\r\nRound.\nBox it."))
    assert images == (picture,)
    assert golds == (r"3 \sqrt{2}",)


@pytest.mark.parametrize("form", ["data_uri", "base64", "binary", "file"])
def test_reads_pictures_in_every_form(tmp_path: Path, form: str) -> None:
    """Base64 with and without a header, plain bytes, and a file beside the data."""
    picture = png("blue")
    (tmp_path / "p.png").write_bytes(picture)
    text = base64.b64encode(picture).decode()
    cell = {
        "data_uri": f"data:image/png;base64,{text}",
        "base64": text,
        "binary": picture,
        "file": {"bytes": None, "path": "p.png"},
    }[form]
    path = write(tmp_path / "a.parquet", {"images": [[cell]], "problem": ["<image>?"], "answer": ["1"]})
    assert one_row(DataConfig(path=path))[1] == (picture,)


def test_reads_verls_prepared_form_and_boxed_answers(tmp_path: Path) -> None:
    """Messages instead of a text, the answer inside reward_model, a box around all of it removed."""
    path = write(
        tmp_path / "a.parquet",
        {
            "images": [[png(), png("green")]],
            "prompt": [[{"role": "system", "content": "S"}, {"role": "user", "content": "a<image>b<image>"}]],
            "reward_model": [{"ground_truth": r"\boxed{\frac{1}{2}}", "style": "rule"}],
        },
    )
    row = open_dataset(DataConfig(path=path, prompt_suffix="!"))[0]
    assert [message.role for message in row.messages] == ["system", "user"]
    assert row.messages[1].parts == (
        TextPart(text="a"),
        ImagePart(index=0),
        TextPart(text="b"),
        ImagePart(index=1),
        TextPart(text="!"),
    )
    assert row.golds == (r"\frac{1}{2}",)


def test_text_only_rows_need_no_images(tmp_path: Path) -> None:
    """A file without pictures is a data set too."""
    path = write(tmp_path / "a.parquet", {"problem": ["1+1?"], "answer": [2]})
    assert one_row(DataConfig(path=path)) == ((TextPart(text="1+1?"),), (), ("2",))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"title": ["x"], "answer": ["1"]},
            r"no column problem or prompt or .* with the prompt's text; it has title, answer\. .*--data\.problem_col",
        ),
        (
            {"problem": ["x"], "result": ["1"]},
            r"no column answer or .* with the correct answer; it has problem, result\..*--data\.answer_col",
        ),
        ({"problem": ["x"], "answer": [""]}, r"row 0: column 'answer' holds empty text"),
        ({"problem": ["x"], "answer": [None]}, r"row 0: column 'answer' holds nothing"),
        (
            {"problem": ["x"], "answer": ["1"], "images": [[b"no picture"]]},
            r"row 0: .* 0 <image>, but there are 1 images",
        ),
        ({"problem": ["<image>"], "answer": ["1"]}, r"row 0: .* 1 <image>, but there are 0 images"),
        (
            {"problem": ["<image>"], "answer": ["1"], "images": [[b"no picture"]]},
            r"row 0: image 0 \(10 bytes\) cannot",
        ),
        (
            {"problem": ["<image>"], "answer": ["1"], "images": [[png(size=(90, 90))[:-40]]]},
            r"row 0: image 0 .* cannot",
        ),
        ({"problem": ["<image>"], "answer": ["1"], "images": [["%%"]]}, r"row 0: an image is text that is not base64"),
        ({"problem": [[1, 2]], "answer": ["1"]}, r"row 0: column 'problem' holds a list with int; want messages"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    """File, column or row, and what to do, when the data set is opened and not later."""
    with pytest.raises(DataError, match=message):
        open_dataset(DataConfig(path=write(tmp_path / "a.parquet", columns)))


def test_says_that_a_file_is_no_parquet(tmp_path: Path) -> None:
    """Not a traceback of Arrow."""
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_dataset(DataConfig(path=str(tmp_path / "a.parquet")))


def test_a_bad_row_in_the_middle_is_found_when_the_file_is_opened(tmp_path: Path) -> None:
    """Not an hour later."""
    path = write(tmp_path / "a.parquet", {"problem": ["a", "<image>", "c"], "answer": ["1"] * 3})
    with pytest.raises(DataError, match="row 1"):
        open_dataset(DataConfig(path=path))


def test_wrong_rows_are_dropped_if_a_person_says_so(tmp_path: Path) -> None:
    """They are named at the start, keep their positions and are passed over; a set of nothing else is refused."""
    columns: dict[str, list[object]] = {"problem": ["a", "<image>", "c", "d"], "answer": ["1", "2", "", "4"]}
    config = DataConfig(path=write(tmp_path / "a.parquet", columns), shuffle=False, wrong_rows="drop")
    with structlog.testing.capture_logs() as logs:
        dataset = open_dataset(config)
    assert [(entry["event"], entry["num_rows"]) for entry in logs] == [("data.wrong_rows_dropped", 2)]
    assert "row 1: its text has 1 <image>" in logs[0]["first"]
    played = [dataset.playable(position) for position in range(4)]
    assert [each.golds if isinstance(each, Example) else each for each in played] == [
        ("1",),
        FilterReason.WRONG_ROW,
        FilterReason.WRONG_ROW,
        ("4",),
    ]
    only_wrong = write(tmp_path / "b.parquet", {"problem": ["a", "b"], "answer": ["", ""]})
    with pytest.raises(DataError, match=r"all 2 rows are wrong; the first: .*b\.parquet', row 0: column 'answer'"):
        open_dataset(DataConfig(path=only_wrong, wrong_rows="drop"))


def test_each_epoch_plays_every_row_once_in_an_order_of_its_own() -> None:
    """The order depends on seed and epoch alone, so one integer is the whole position."""
    orders = [[row_at(epoch * 10 + i, 10, 7) for i in range(10)] for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert row_at(25, 10, 7) == orders[2][5]
    assert [row_at(i, 10, 8) for i in range(10)] != orders[0]
    assert [row_at(i, 3, None) for i in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("num_rows", [3, 4, 10, 101])
def test_no_row_comes_back_at_once_where_an_epoch_ends(num_rows: int) -> None:
    """A prompt filtered late in an epoch, such as one that is solved always, would be played again for nothing."""
    for seed in range(20):
        played: dict[int, int] = {}
        for position in range(5 * num_rows):
            row = row_at(position, num_rows, seed, source="geometry")
            assert position - played.get(row, -num_rows) > num_rows // 3
            played[row] = position
        assert sorted(played) == list(range(num_rows))


def test_built_in_problems_come_through_the_same_door() -> None:
    """One picture, one mark, one answer, and no end."""
    four, config = {"": built_in(DataConfig(), num_rows=4)}, DataConfig()
    dataset = Dataset(four, config, seed=3)
    row = dataset[4 * 1000 + 1]
    assert row.messages[0].parts[0] == ImagePart(index=0)
    assert len(row.images) == len(row.golds) == 1
    assert dataset.num_rows == 4
    one_epoch = [dataset[position].golds for position in range(4)]
    other_order = [Dataset(four, config, seed=4)[position].golds for position in range(4)]
    assert sorted(one_epoch) == sorted(other_order)
    in_order = Dataset(four, DataConfig(shuffle=False), seed=3)
    assert in_order[5].images == in_order[1].images


def test_refuses_a_picture_that_the_engine_would_refuse(tmp_path: Path) -> None:
    """120 megapixels in a few hundred kilobytes: named before the run starts, not by every worker in it."""
    big = png(mode="1", size=(12_000, 10_000))
    path = write(
        tmp_path / "a.parquet",
        {"images": [[{"bytes": big, "path": None}]], "problem": ["<image>Find x."], "answer": ["1"]},
    )
    with pytest.raises(
        DataError, match=r"row 0: image 0: 120000000 pixels \(12000 x 10000\); a request may have 100000000"
    ):
        open_dataset(DataConfig(path=path))


def limit_of(model_path: Path, max_tokens: int) -> PromptLimit:
    """A limit of this many tokens of a prompt."""
    limit = PromptLimit.of_run(model_path, context=max_tokens + 8, max_new_tokens=8)
    assert limit is not None
    return limit


def test_a_prompt_is_as_long_as_the_engine_counts_it(tmp_path: Path, tiny_model_path: Path) -> None:
    """Rendered with the chat template, each picture expanded as the image processor does it."""
    columns: dict[str, list[object]] = {
        "images": [[], [png(size=(96, 64))], [png(size=(500, 333)), png(size=(33, 900))]],
        "problem": ["1+1?", "<image>Find x.", "<image> or <image>?\r\n<|im_end|>"],
        "answer": ["1"] * 3,
    }
    config = DataConfig(path=write(tmp_path / "a.parquet", columns), system_prompt="Think.", shuffle=False)
    dataset, limit = open_dataset(config), limit_of(tiny_model_path, 1000)
    renderer, checker = Renderer.load(tiny_model_path), PromptChecker(tiny_model_path, max_tokens=1)
    for position in range(3):
        example = dataset[position]
        ids = renderer.render_prompt(example.messages, num_images=len(example.images))
        sampling = generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8)
        request = generate_pb2.GenerateRequest(input_ids=ids, sampling=sampling)
        with pytest.raises(PromptTooLongError, match=f"the prompt has {limit.num_tokens(example)} tokens"):
            checker.check(request, example.images)


def test_prompts_that_leave_no_room_are_found_at_the_start_and_never_played(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """They are counted once, and keep their positions: another limit moves no other row."""
    problems = ["a", "b" * 500, "c", "d" * 700, "e"]
    config = DataConfig(path=write(tmp_path / "a.parquet", {"problem": problems, "answer": list("12345")}))
    with structlog.testing.capture_logs() as logs:
        dataset = open_dataset(config, seed=3, limit=limit_of(tiny_model_path, 300))
    (found,) = [entry for entry in logs if entry["event"] == "data.overlong_prompts_dropped"]
    assert (found["num_rows"], found["num_rows_checked"], found["max_prompt_tokens"]) == (2, 5, 300)
    assert 700 <= found["longest_prompt_tokens"] < 750
    unlimited = open_dataset(config, seed=3)
    for position in range(10):
        example, all_of_them = dataset.playable(position), unlimited[position]
        assert example == (FilterReason.OVERLONG_PROMPT if all_of_them.golds in (("2",), ("4",)) else all_of_them)


@pytest.mark.parametrize(
    ("max_prompt_tokens", "limits", "counted"),
    [
        (0, {}, {"data.overlong_prompts_kept": (2, 300)}),
        (600, {}, {"data.overlong_prompts_kept": (1, 300), "data.overlong_prompts_dropped": (1, 600)}),
        (0, {"max_tokens": 600}, {"data.overlong_prompts_kept": (1, 300), "data.overlong_prompts_dropped": (1, 599)}),
    ],
)
def test_prompts_that_are_played_with_less_room_are_counted_at_the_start(
    tmp_path: Path,
    tiny_model_path: Path,
    max_prompt_tokens: int,
    limits: dict[str, int],
    counted: dict[str, tuple[int, int]],
) -> None:
    """With filters.overlong_prompts = "keep", which drops only what exceeds data.max_prompt_tokens."""
    columns = {"problem": ["a", "b" * 500, "c", "d" * 700, "e"], "answer": list("12345")}
    config = DataConfig.model_validate({"path": write(tmp_path / "a.parquet", columns), "limits": limits})
    limit = PromptLimit.of_run(
        tiny_model_path, context=308, max_new_tokens=8, max_prompt_tokens=max_prompt_tokens, keep=True
    )
    with structlog.testing.capture_logs() as logs:
        dataset = open_dataset(config, limit=limit)
    found = {each["event"]: (each["num_rows"], each["max_prompt_tokens"]) for each in logs if "num_rows" in each}
    assert found == counted
    num_dropped, _ = counted.get("data.overlong_prompts_dropped", (0, 0))
    assert dataset.num_passed_over() == num_dropped
    assert sum(isinstance(dataset.playable(position), Example) for position in range(5)) == 5 - num_dropped


def test_a_prompt_of_exactly_the_limit_is_played(tmp_path: Path, tiny_model_path: Path) -> None:
    """It leaves max_new_tokens; one token less does not."""
    config = DataConfig(path=write(tmp_path / "a.parquet", {"problem": ["a", "abc"], "answer": ["1"] * 2}))
    longest = max(limit_of(tiny_model_path, 100).num_tokens(open_dataset(config)[position]) for position in range(2))
    for max_tokens, num_played in ((longest, 2), (longest - 1, 1)):
        dataset = open_dataset(config, limit=limit_of(tiny_model_path, max_tokens))
        assert sum(isinstance(dataset.playable(position), Example) for position in range(2)) == num_played


def test_refuses_data_and_settings_with_which_no_prompt_fits(tmp_path: Path, tiny_model_path: Path) -> None:
    """With the lengths and what to change, before anything is played."""
    config = DataConfig(path=write(tmp_path / "a.parquet", {"problem": ["a" * 200, "b" * 300], "answer": ["1"] * 2}))
    with pytest.raises(
        DataError, match=r"all 2 prompts are longer than the 50 tokens .* shortest of them 2\d\d; raise rollout\."
    ):
        open_dataset(config, limit=limit_of(tiny_model_path, 50))
    with pytest.raises(ConfigError, match=r"max_new_tokens = 64 leaves no room for a prompt in a context of 64"):
        PromptLimit.of_run(tiny_model_path, context=64, max_new_tokens=64)


def test_tools_count_in_a_prompts_length(tmp_path: Path, tiny_model_path: Path) -> None:
    """A row whose tools leave no room is passed over, as one with a long text is."""
    tool = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}
    path = write(
        tmp_path / "a.parquet", {"tools": [None, json.dumps([tool])], "problem": ["1+1?"] * 2, "answer": ["1"] * 2}
    )
    config = DataConfig(path=path, tools_column="tools", shuffle=False)
    limit = limit_of(tiny_model_path, 1000)
    plain, with_tools = (limit.num_tokens(open_dataset(config)[row]) for row in range(2))
    example = open_dataset(config)[1]
    renderer = Renderer.load(tiny_model_path)
    assert with_tools == len(renderer.render_prompt(example.messages, num_images=0, tools=[tool])) > plain + 20
    dataset = open_dataset(config, limit=limit_of(tiny_model_path, with_tools - 1))
    assert isinstance(dataset.playable(0), Example)
    assert dataset.playable(1) is FilterReason.OVERLONG_PROMPT


def test_variables_of_the_template_count_in_a_prompts_length(tmp_path: Path, tiny_model_path: Path) -> None:
    """With `add_vision_id` it says "Picture 1: " before the first."""
    path = write(tmp_path / "a.parquet", {"images": [[png()]], "problem": ["<image>Find x."], "answer": ["1"]})
    limit = limit_of(tiny_model_path, 1000)
    plain, told = (
        limit.num_tokens(open_dataset(DataConfig(path=path, chat_template_kwargs=variables))[0])
        for variables in ({}, {"add_vision_id": True})
    )
    renderer = Renderer.load(tiny_model_path)
    assert told == plain + len(renderer.render_text("Picture 1: "))


def test_a_row_that_the_model_cannot_read_is_named(tmp_path: Path, tiny_model_path: Path) -> None:
    """A strip of a picture, which every engine would refuse."""
    path = write(
        tmp_path / "a.parquet", {"images": [[png(size=(900, 3))]], "problem": ["<image>Find x."], "answer": ["1"]}
    )
    with pytest.raises(DataError, match=r"row 0: images\[0\] is 900 x 3 pixels; .* repair the row or remove it"):
        open_dataset(DataConfig(path=path), limit=limit_of(tiny_model_path, 1000))
