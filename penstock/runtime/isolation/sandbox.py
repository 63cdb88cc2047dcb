"""Confines a worker process with a seccomp filter that it can never remove, whatever it runs.

Inside there is no network, no new process or program and no signal to any process. No file can be opened for writing,
created, moved or removed. Reading files, memory, threads and open descriptors still work, because sympy and users'
verifiers need them. The filter stops hostile answers and code that does what its author did not mean; it does not hide
files that the service may read. A strict filter, for code that a policy writes, hides them too: no file can be opened
or looked at, and no limit of the process changed.
"""

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Sequence

from penstock.runtime.isolation.syscalls import ARCHITECTURES, FIRST_RECENT, Architecture

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _JUMP_EQUAL, _JUMP_NOT_BELOW, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _KILL_PROCESS, _FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000

_CLONE_THREAD = 0x00010000
_TYPING = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which insert terminal input."""
_SIGNALLING_IOCTLS = (0x8901, 0x8902)
_SIGNALLING_FCNTLS = (8, 10, 15)
"""FIOSETOWN and SIOCSPGRP; F_SETOWN, F_SETSIG and F_SETOWN_EX: they make the kernel send any signal to any process."""
_O_TMPFILE_BIT = 0o20000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | _O_TMPFILE_BIT

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, because a forked child must not import


class SandboxError(Exception):
    """The kernel, or the container, does not let a process confine itself."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def enter(*, is_strict: bool = False) -> None:
    """Confine this process and its threads permanently.

    Args:
        is_strict: Also forbid opening and looking at files, so that nothing more can be imported, and changing limits.

    Raises:
        SandboxError: the system does not allow it.
    """
    instructions = _filter(platform.machine(), is_strict=is_strict)
    program = _Program(len(instructions) // _INSTRUCTION.size, instructions)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def probe() -> str:
    """Return why `enter` does not work here, or nothing if it does; tried in a child process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter()
        except Exception as error:  # noqa: BLE001 - the child has nobody else to tell it to
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        reason = answer.read().decode()
    _, status = os.waitpid(pid, 0)
    return reason or (f"the child ended with wait status {status}" if status else "")


def _prctl(option: int, *arguments: int) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    if _LIBC.prctl(option, *map(ctypes.c_ulong, padded)) != 0:
        raise SandboxError(f"prctl({option}): {os.strerror(ctypes.get_errno())}")


@functools.cache
def _filter(machine: str, *, is_strict: bool) -> bytes:
    """Return the filter in the kernel's form: a program over the call's number, architecture and arguments."""
    if machine not in ARCHITECTURES:
        raise SandboxError(f"there is no filter for {machine}; known: {', '.join(sorted(ARCHITECTURES))}")
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in _instructions(ARCHITECTURES[machine], is_strict))


def _instructions(architecture: Architecture, is_strict: bool) -> list[tuple[int, int, int, int]]:
    """Return the instructions, each as (code, instructions to skip if true, if false, operand)."""
    deny = (_RETURN, 0, 0, _FAIL_WITH | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture.audit_id),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_NOT_BELOW, 0, 1, FIRST_RECENT),  # the x32 calls of x86_64 are above it too
        (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS),
    ]
    for number in (*architecture.denied, *(architecture.denied_strictly if is_strict else ())):
        program += [(_JUMP_EQUAL, 0, 1, number), deny]
    for number, flags in architecture.opens:
        program += _if_argument(number, flags, _JUMP_ANY_BIT, (_WRITING,), deny, allow)
    program += _if_argument(architecture.clone, 0, _JUMP_ANY_BIT, (_CLONE_THREAD,), allow, deny)
    program += _if_argument(architecture.fcntl, 1, _JUMP_EQUAL, _SIGNALLING_FCNTLS, deny, allow)
    program += _if_argument(architecture.ioctl, 1, _JUMP_EQUAL, (*_TYPING, *_SIGNALLING_IOCTLS), deny, allow)
    program += _if_argument(architecture.prlimit, 0, _JUMP_EQUAL, (0,), allow, deny)
    return [*program, allow]


def _if_argument(
    number: int,
    index: int,
    test: int,
    operands: Sequence[int],
    then: tuple[int, int, int, int],
    otherwise: tuple[int, int, int, int],
) -> list[tuple[int, int, int, int]]:
    """For call `number`: `then` if the low half of argument `index` passes `test` for an operand, else `otherwise`."""
    body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)]
    for operand in operands:
        body += [(test, 0, 1, operand), then]
    body.append(otherwise)
    return [(_JUMP_EQUAL, 0, len(body), number), *body]
