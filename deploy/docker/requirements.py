"""Print what an image installs: the closure of one extra of pyproject.toml, pinned, out of requirements.lock.

    python3 requirements.py openai                    # penstock's own requirements and those of its extra `openai`
    python3 requirements.py --packages torch          # torch and what it needs

The lock file says with each package through which others it came, so no resolver and no registry is needed. An image's
layer is built anew when one of its own pins changes, not when any of the lock file does.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

_ROOT = "penstock (pyproject.toml)"


def closure(lock: str, roots: set[str]) -> list[str]:
    """The lock file's lines, without comments, of `roots` and of everything that they need.

    Raises:
        ValueError: a root is not in the lock file.
    """
    pins: dict[str, str] = {}
    parents: dict[str, set[str]] = {}
    for line in lock.splitlines():
        pin, _, comment = line.partition("#")
        if not pin.strip() or line[0].isspace():
            continue
        name = normalised(pin)
        pins[name] = pin.strip()
        parents[name] = {parent.strip() for parent in comment.strip().removeprefix("via ").split(",")} - {_ROOT}
    if missing := roots - pins.keys():
        raise ValueError(f"requirements.lock has no {', '.join(sorted(missing))}; run `make lock`")
    wanted: set[str] = set()
    found = set(roots)
    while found != wanted:
        wanted = found
        found = wanted | {name for name, through in parents.items() if through & wanted}
    return [pins[name] for name in sorted(wanted)]


def normalised(requirement: str) -> str:
    """The package's name, as the lock file writes it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise ValueError(f"{requirement!r} is no requirement")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def main() -> None:
    """Read the two files of the working directory and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", nargs="?")
    parser.add_argument("--packages", nargs="+", default=[])
    arguments = parser.parse_args()
    roots = [*arguments.packages]
    if arguments.extra:
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        roots += project["dependencies"] + project["optional-dependencies"][arguments.extra]
    pins = closure(Path("requirements.lock").read_text(), {normalised(root) for root in roots})
    sys.stdout.write("\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
