"""Generate penstock/v1 from proto/; with --check, fail when the committed code differs from what would be made."""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Write the generated modules and their type stubs below `out`."""
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={scripts / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *plugins, *flags, *protos]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> int:
    """Return 0, or 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made, kept = Path(scratch) / "penstock/v1", ROOT / "penstock/v1"
        names = {p.name for p in made.iterdir()} | {p.name for p in kept.glob("*_pb2*")}
        _, differing, missing = filecmp.cmpfiles(made, kept, sorted(names), shallow=False)
        stale = sorted(differing + missing)
    if stale:
        sys.stderr.write(f"penstock/v1 is not what proto/ makes ({', '.join(stale)}): run `make proto` and commit\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
