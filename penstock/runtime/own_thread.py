"""Runs blocking calls that may not end, each in a thread of its own, which is ended when its caller is cancelled.

The event loop's pool would not do: calls that do not end would fill it, and a process waits for that pool when it ends.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

import structlog

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

_END_S: Final = 10.0
"""Seconds after which a thread that was ended and still runs is reported."""

_left_behind = set[threading.Thread]()


async def run_in_own_thread(call: Callable[[], ResultT], *, name: str) -> ResultT:
    """Return the result of a blocking call.

    If this coroutine is cancelled, `SystemExit` is raised in the thread, which ends Python code at its next instruction
    but not a call that blocks in C. A thread that still runs some seconds later is reported in the log.

    Args:
        call: It sees the context variables of the caller.
        name: What is called, for the thread's name and the log.

    Raises:
        RuntimeError: the call raised what is no Exception, such as SystemExit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[ResultT | None, Exception | None]] = loop.create_future()

    def work() -> None:
        value: ResultT | None = None
        failure: Exception | None = None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - raised again below, where it is awaited
            failure = error
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the whole process there
            failure = RuntimeError(repr(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    def settle(value: ResultT | None, failure: Exception | None) -> None:
        if not done.done():
            done.set_result((value, failure))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name=name, daemon=True)
    thread.start()
    try:
        value, failure = await done
    except asyncio.CancelledError:
        if thread.is_alive():  # or else another thread may have its number
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            loop.call_later(_END_S, _report_if_alive, thread)
        raise
    if failure is not None:
        raise failure
    return cast(ResultT, value)


def _report_if_alive(thread: threading.Thread) -> None:
    """Log a thread that has not ended, with the number of all such threads that still run."""
    _left_behind.difference_update([each for each in _left_behind if not each.is_alive()])
    if thread.is_alive():
        _left_behind.add(thread)
        log.warning(
            f"{thread.name}.left_behind",
            num_threads=len(_left_behind),
            reason="its thread was ended, and still runs: it blocks in a call that nothing interrupts, or catches all",
        )
