"""The `penstock` command: runs the command line in `services`, and refuses another package of that name.

`services` is a common name for a package of one's own. Where one is found first, nothing of it is imported.
"""

import importlib
import importlib.util
from pathlib import Path

from penstock.errors import SetupError
from penstock.runtime import process

_OURS = Path(__file__).resolve().parents[1] / "services" / "__init__.py"


def main() -> int:
    """Run the command line and return its exit code; 2 if another package `services` hides Penstock's own."""
    found = importlib.util.find_spec("services")
    if found is None or found.origin is None or Path(found.origin).resolve() != _OURS:
        where = "no package" if found is None else f"another package, {found.origin or 'a folder'},"
        return process.report_error(
            SetupError(
                f"{where} answers to the name services, which Penstock needs at {_OURS.parent}; leave its folder out "
                "of PYTHONPATH, or rename it"
            )
        )
    code: int = importlib.import_module("services.cli").main()
    return code
