"""What becomes of an error that ends a process."""

import asyncio

import pytest

from penstock.errors import DataError, SetupError, UnavailableError
from penstock.process import EXIT_FAILURE, EXIT_USER_ERROR, run


def ending(*errors: Exception) -> int:
    """The exit code of a process whose tasks end with `errors`, at once."""

    async def fail(error: Exception) -> None:
        raise error

    async def main(stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            for number, error in enumerate(errors):
                (inner, outer)[number % 2].create_task(fail(error))

    return run(main)


@pytest.mark.parametrize(
    ("errors", "code", "line"),
    [
        ([DataError("row 3\n  is wrong")], EXIT_USER_ERROR, "error: row 3 is wrong\n"),
        ([UnavailableError("nobody answers")], EXIT_FAILURE, "error: nobody answers\n"),
        (
            [UnavailableError("nobody answers"), SetupError("port 7 is in use")],
            EXIT_USER_ERROR,
            "error: port 7 is in use\n",
        ),
    ],
)
def test_an_error_out_of_a_task_group_is_one_line(
    capsys: pytest.CaptureFixture[str], errors: list[Exception], code: int, line: str
) -> None:
    """The groups around it are not shown; what a person can mend goes first."""
    assert ending(*errors) == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback() -> None:
    """An error that nobody raised on purpose is not hidden behind one that somebody did."""
    with pytest.raises(BaseExceptionGroup) as caught:
        ending(UnavailableError("nobody answers"), ZeroDivisionError("a bug"))
    assert caught.group_contains(ZeroDivisionError)
