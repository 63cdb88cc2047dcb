"""Correct answers as data sets publish them, and what is refused because it does not say which answer is meant."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.rows.golds import read_golds, read_solution


@pytest.mark.parametrize(
    ("cell", "golds"),
    [
        ("5", ("5",)),
        (" 5\n", ("5",)),
        (5, ("5",)),
        (5.0, ("5",)),
        (0.1, ("0.1",)),
        (1e-7, ("0.0000001",)),
        (2.5e20, ("250000000000000000000",)),
        (Decimal("2.50"), ("2.5",)),
        (["5", 5.5], ("5", "5.5")),
        ({"ground_truth": "5", "style": "rule"}, ("5",)),
        ({"ground_truth": [r"\frac{1}{2}", "0.5"]}, (r"\frac{1}{2}", "0.5")),
        ("$5$", ("5",)),
        ("$$5$$", ("5",)),
        (r"\(5\)", ("5",)),
        (r"\[ 5 \]", ("5",)),
        ("$5", ("$5",)),
        ("$3$ and $4$", ("$3$ and $4$",)),
        (r"\boxed{5}", ("5",)),
        (r"\boxed{\frac{1}{2}}", (r"\frac{1}{2}",)),
        (r"$\boxed{ 5 }$", ("5",)),
        (r"Answer: \boxed{5}", ("5",)),
        (r"The final answer is $\boxed{\{1, 2\}}$.", (r"\{1, 2\}",)),
        ("Answer: 5", ("5",)),
        ("<answer> 5 </answer>", ("5",)),
        ("2 and 3 are <SOLUTION>5</SOLUTION>", ("5",)),
        ("<think>1, then 2\n</think>\n<answer>$\\boxed{5}$</answer>", ("5",)),
        ("Final answer: $x = 5$", ("x = 5",)),
        ("She sold 48/2 = <<48/2=24>>24 in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72", ("72",)),
        ("#### $2,125 \r\n", ("$2,125",)),
        ("Answer: 4\n####5", ("5",)),
        ("#### 4\nThe answer is \\boxed{5}.", ("5",)),
        ("##### 5", ("##### 5",)),
        ("#### Proof\nBy parity.\n#### Answer\nNo.", ("#### Proof\nBy parity.\n#### Answer\nNo.",)),
        ("yes", ("yes",)),
        (r"3 \sqrt{2}", (r"3 \sqrt{2}",)),
    ],
)
def test_an_answer_is_the_plain_text_that_is_graded(cell: Any, golds: tuple[str, ...]) -> None:
    """Without box, label, dollar signs, exponent and the zeros of a float."""
    assert read_golds(cell) == golds


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (True, "true, a truth value; write the answer as text"),
        (None, "nothing"),
        ("", "empty text"),
        ("Answer: ", "empty text"),
        (float("nan"), "nan, which is no answer"),
        ([], "an empty list"),
        (["5", None], "nothing"),
        ({"style": "rule"}, "nothing"),
        (r"\boxed{5} or \boxed{6}", "2 boxes; want one answer, or a list"),
        ("<answer>5</answer> or <answer>6</answer>", "2 <answer>; want one answer, or a list"),
        ("<SOLUTION>5</SOLUTION> or <answer>6</answer>", "2 <SOLUTION>; want one answer, or a list"),
        ("<answer></answer>", "empty text"),
        ("#### 5\nor\n#### 6", "2 lines with ####; want one answer, or a list"),
        (b"5", "bytes; want the correct answer as text"),
    ],
)
def test_what_does_not_say_the_answer_is_refused(cell: Any, reason: str) -> None:
    """No guess is graded."""
    with pytest.raises(ValueError, match=reason):
        read_golds(cell)


@pytest.mark.parametrize(
    ("cell", "golds"),
    [
        ("<think>2, 3</think> <answer> 5 </answer>", ("5",)),
        ("2 and 3 are <SOLUTION>5</SOLUTION>", ("5",)),
        (r"They are $\boxed{5}$.", ("5",)),
        ("2 and 3\n#### 5", ("5",)),
    ],
)
def test_a_solution_marks_its_answer(cell: str, golds: tuple[str, ...]) -> None:
    """With a tag, a box or GSM8K's last line."""
    assert read_solution(cell) == golds


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (
            "2 and 3 are 5.",
            "^text in which no <answer>, .* or last line with #### marks the correct answer; mark it, or",
        ),
        ("#### Step 1\n2 and 3 are 5.", "^text in which no"),
        (r"\boxed{5", "^text in which no"),
        (None, "^nothing in which no"),
        (r"\boxed{5} or \boxed{6}", "2 boxes"),
    ],
)
def test_a_solution_that_does_not_mark_one_answer_is_refused(cell: Any, reason: str) -> None:
    """Its whole text would be graded as the answer."""
    with pytest.raises(ValueError, match=reason):
        read_solution(cell)


def test_a_column_of_solutions_is_read_as_answers_only_where_it_is_named(tmp_path: Any) -> None:
    """Otherwise it has to mark them."""
    pq.write_table(pa.table({"problem": ["a", "b"], "solution": ["<answer>5</answer>", "six"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet', row 1: column 'solution' holds text in which no <answer>"):
        open_dataset(DataConfig(path=str(tmp_path / "a.parquet")))
    named = open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), answer_column="solution", shuffle=False))
    assert [named[position].golds for position in range(2)] == [("5",), ("six",)]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_a_short_float_is_the_decimal_that_was_written(kind: pa.DataType, tmp_path: Any) -> None:
    """0.1 in float32 is no 0.10000000149011612, inside a struct neither."""
    spec = pa.array([{"ground_truth": [0.1, 3]}], pa.struct({"ground_truth": pa.list_(kind)}))
    pq.write_table(pa.table({"problem": ["a"], "reward_model": spec}), tmp_path / "a.parquet")
    assert open_dataset(DataConfig(path=str(tmp_path / "a.parquet")))[0].golds == ("0.1", "3")


def test_a_truth_value_is_refused_by_row_and_column(tmp_path: Any) -> None:
    """True would otherwise be graded as the text 'True'."""
    pq.write_table(pa.table({"problem": ["a"], "answer": [True]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet', row 0: column 'answer' holds true, a truth value"):
        open_dataset(DataConfig(path=str(tmp_path / "a.parquet")))
