"""libibverbs for machines that have neither RDMA nor the library.

Mooncake's wheel is linked against libibverbs, which pip does not bring, also where it moves everything over TCP. There
a stand-in does: a shared library of this name, made here, with the functions that mooncake refers to. Each returns 0,
so that the list of devices is empty, which is the truth. Where the library is installed it is used.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Mapping, Sequence

from penstock.errors import SetupError

LIBRARY = "libibverbs.so.1"

_FUNCTIONS = {
    "IBVERBS_1.0": "create_comp_channel destroy_comp_channel",
    "IBVERBS_1.1": "ack_async_event ack_cq_events alloc_pd close_device create_cq create_qp dealloc_pd dereg_mr "
    "destroy_cq destroy_qp event_type_str fork_init free_device_list get_async_event get_cq_event get_device_list "
    "get_device_name modify_qp open_device query_device query_gid query_port query_qp reg_mr wc_status_str",
    "IBVERBS_1.8": "reg_mr_iova2",
    "IBVERBS_1.11": "_ibv_query_gid_ex",
}
"""What mooncake refers to, without the prefix ibv_, by the version of the library that brought it."""

_MACHINES = {
    "x86_64": (62, bytes.fromhex("31c0c3")),  # xor eax, eax; ret
    "aarch64": (183, bytes.fromhex("000080d2c0035fd6")),  # mov x0, #0; ret
}
"""ELF's number of the machine, and a function that returns 0."""

# Of the ELF format: segments, tags of the dynamic section, and sizes.
_LOAD, _DYNAMIC, _GNU_STACK = 1, 2, 0x6474E551
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 4, 5, 6, 10, 11, 14
_VERSYM, _VERDEF, _VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
_HEADER_SIZE, _SEGMENT_SIZE, _SYMBOL_SIZE = 64, 56, 24
_PAGE = 0x10000
"""The largest that any of the machines has."""

_loaded: list[ctypes.CDLL] = []


def require_verbs(*, cuda: bool) -> None:
    """Have libibverbs in this process, and in those that are forked from it.

    Raises:
        SetupError: it is not installed, and a stand-in would not do.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        machine = _MACHINES.get(platform.machine())
        if cuda or machine is None:  # an engine on a GPU has RDMA in mind, or should
            raise SetupError(
                f"rollout.transfer_backend = 'mooncake' needs {LIBRARY}, which does not load: {error}; "
                "apt-get install libibverbs1 (dnf install libibverbs)"
            ) from None
        functions = {version: [_full(name) for name in names.split()] for version, names in _FUNCTIONS.items()}
        _load(stand_in(functions, *machine))


def _load(image: bytes) -> None:
    descriptor = os.memfd_create(LIBRARY)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(image)
        # For good: whatever is linked against a library of this name finds this one from now on.
        _loaded.append(ctypes.CDLL(f"/proc/self/fd/{descriptor}"))
    except OSError as error:
        raise SetupError(
            f"rollout.transfer_backend = 'mooncake' needs {LIBRARY}, which is not installed, and the stand-in for "
            f"machines without RDMA does not load here: {error}; apt-get install libibverbs1"
        ) from None
    finally:
        os.close(descriptor)


def stand_in(functions: Mapping[str, Sequence[str]], machine: int, code: bytes) -> bytes:
    """An ELF64 shared library named `LIBRARY` whose functions all are `code`.

    Args:
        functions: Their names, by the version under which they are looked up.
        machine: ELF's number of the machine.
        code: Instructions that can stand anywhere.
    """
    versioned = [(name, index) for index, version in enumerate(functions, start=2) for name in functions[version]]
    texts = [LIBRARY, *functions, *(name for name, _ in versioned)]
    names = b"\0" + b"".join(text.encode() + b"\0" for text in texts)
    offsets = {text: names.index(b"\0" + text.encode() + b"\0") + 1 for text in texts}

    # One bucket, whose chain has all symbols; number 0 is none.
    chain = [0, *range(2, len(versioned) + 1), 0]
    parts = {
        "hash": struct.pack(f"<{3 + len(chain)}I", 1, len(chain), 1, *chain),
        "names": names,
        "versions_of_symbols": struct.pack(f"<{1 + len(versioned)}H", 0, *(index for _, index in versioned)),
        "versions": b"".join(
            # The first is the library itself; each has one name, and the last is followed by none.
            struct.pack("<HHHHIIIII", 1, index == 1, index, 1, _hash(text), 20, 28 * (index <= len(functions)), at, 0)
            for index, text in enumerate((LIBRARY, *functions), start=1)
            for at in (offsets[text],)
        ),
        "code": code,
    }
    num_segments = 4
    at = _HEADER_SIZE + _SEGMENT_SIZE * num_segments
    places: dict[str, int] = {}
    for part, content in parts.items():
        places[part] = at = _aligned(at)
        at += len(content)
    places["symbols"] = at = _aligned(at)
    parts["symbols"] = bytes(_SYMBOL_SIZE) + b"".join(
        struct.pack("<IBBHQQ", offsets[name], 0x12, 0, 1, places["code"], len(code))  # a global function
        for name, _ in versioned
    )
    code_segment_size = at + len(parts["symbols"])
    places["dynamic"] = _aligned(code_segment_size, _PAGE)
    parts["dynamic"] = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (_SONAME, offsets[LIBRARY]),
            (_HASH, places["hash"]),
            (_STRTAB, places["names"]),
            (_STRSZ, len(names)),
            (_SYMTAB, places["symbols"]),
            (_SYMENT, _SYMBOL_SIZE),
            (_VERSYM, places["versions_of_symbols"]),
            (_VERDEF, places["versions"]),
            (_VERDEFNUM, 1 + len(functions)),
            (0, 0),
        )
    )
    read, write, execute = 4, 2, 1
    segments = (
        (_LOAD, read | execute, 0, code_segment_size, _PAGE),
        (_LOAD, read | write, places["dynamic"], len(parts["dynamic"]), _PAGE),  # the loader writes there
        (_DYNAMIC, read | write, places["dynamic"], len(parts["dynamic"]), 8),
        (_GNU_STACK, read | write, 0, 0, 16),  # or else the stack is made executable
    )
    places["header"] = 0
    parts["header"] = (
        b"\x7fELF\2\1\1".ljust(16, b"\0")  # 64 bits, little-endian
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, _HEADER_SIZE, 0, 0, _HEADER_SIZE, _SEGMENT_SIZE, 4, 64, 0, 0)
        + b"".join(
            struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, alignment)
            for kind, flags, at, size, alignment in segments
        )
    )
    image = bytearray(places["dynamic"] + len(parts["dynamic"]))
    for part, content in parts.items():
        image[places[part] : places[part] + len(content)] = content
    return bytes(image)


def _hash(text: str) -> int:
    """ELF's hash of a name."""
    value = 0
    for byte in text.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def _aligned(at: int, to: int = 8) -> int:
    return -(-at // to) * to


def _full(name: str) -> str:
    return name if name.startswith("_") else f"ibv_{name}"
