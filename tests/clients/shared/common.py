"""What the examples share. They run where Penstock is not installed."""

import base64
import json
import sys

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
PICTURE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()
_NOT_INSTALLED = 77


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def report(results: object) -> int:
    """Print what the examples got; return the exit status for a client that is not installed."""
    if isinstance(results, ImportError):
        sys.stderr.write(f"{results}\n")
        return _NOT_INSTALLED
    sys.stdout.write(json.dumps(results) + "\n")
    return 0
