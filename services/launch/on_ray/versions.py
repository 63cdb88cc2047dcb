"""Compares what a host has installed with what the launcher's has, and says what differences mean for the run. Pure."""

from services.doctor.hosts.builds import BUILD_REMEDY, go_together, without_build
from services.launch.on_ray.facts import Facts


def difference(found: Facts, own: Facts) -> str:
    """Return the difference from the launcher's host that keeps a host out of the run; empty if there is none."""
    python = f"Python {found['python']} is there, {own['python']} here"
    if found["python"] != own["python"]:
        return f"{python}; install the same one"
    if not found["penstock"]:
        return f"penstock is not installed there; install penstock {own['penstock']} as here"
    if found["penstock"] != own["penstock"]:
        return f"penstock {found['penstock']} is there, {own['penstock']} here; install the same version"
    if found["code"] != own["code"]:
        return (
            f"its penstock {found['penstock']} has other code ({found['code'] or 'none'}) than the one here "
            f"({own['code']}); install the same wheel, or the same checkout"
        )
    for name, version in own["versions"].items():
        there = found["versions"].get(name, version)
        if without_build(there) != without_build(version):
            return f"{name} {there} is there, {version} here; install the same version"
    return ""


def describe_builds(found: Facts, own: Facts) -> str:
    """Return what a person should know of a host's builds of packages, if versions do not differ; empty if nothing."""
    there = found["versions"]
    clashing = [
        f"{name} {there[name]} is there, {version} here"
        for name, version in own["versions"].items()
        if not go_together(there.get(name, version), version)
    ]
    return f"{', '.join(clashing)}; {BUILD_REMEDY}" if clashing else ""
