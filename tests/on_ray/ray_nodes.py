"""A real Ray cluster whose nodes come and go, in a process of its own: `python ray_nodes.py <JSON of the head node>`.

Each line of standard input is one command, answered by one line: {"add": {...}, "hidden": folder or null} with the
node's id, {"kill": id} when nothing of the node is left and Ray lists it no longer. The cluster ends with the input.
"""

import ctypes
import json
import logging
import os
import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_NOTICED_S = 120.0
"""Ray asks after a node every few seconds, and takes it for dead when several answers are missing."""


def main() -> None:
    """Obey until the input ends."""
    logging.disable()
    cluster = Cluster()
    nodes: dict[str, Any] = {}

    def add(options: dict[str, Any]) -> str:
        node = cluster.add_node(**options)
        nodes[node.node_id] = node
        return str(node.node_id)

    head = add(json.loads(sys.argv[1]))
    say({"address": cluster.address, "dashboard": cluster.webui_url, "node": head})
    for line in sys.stdin:
        command = json.loads(line)
        if "add" in command:
            if command["hidden"] is not None:
                hide(command["hidden"])
            say({"node": add(command["add"])})
        else:
            cluster.remove_node(nodes.pop(command["kill"]), allow_graceful=False)
            cluster.wait_for_nodes(timeout=_NOTICED_S)
            say({})
    cluster.shutdown()


def hide(folder: str) -> None:
    """Give what this process starts from now on mounts of its own, in which `folder` is empty.

    There is no way back: Ray's threads share this one's root, and then Linux lets none return.
    """
    if _LIBC.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS)")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


def say(answer: dict[str, Any]) -> None:
    """Answer a command; Ray writes to the standard output as well."""
    os.write(_ANSWERS, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    main()
