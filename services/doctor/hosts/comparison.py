"""Findings from what two hosts say of themselves. Pure."""

from collections.abc import Iterator, Mapping

from penstock.config import RunConfig
from services.doctor.finding import Finding, fault, ok, warning
from services.doctor.hosts.builds import BUILD_REMEDY, go_together, without_build
from services.doctor.hosts.facts import HostFacts, shared_folder

MAX_CLOCK_S = 1.0
"""Above it, the timeline and the ages of what waits in queues are wrong by more than people would overlook."""
BROKEN_CLOCK_S = 60.0
"""Above it, certificates may not be valid yet, and the newest file of a shared folder is not the newest."""

_CODE = "Penstock's files"


def compare(
    own: HostFacts, other: HostFacts, *, run: RunConfig, ahead_s: float, reach_errors: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the findings on another host.

    Args:
        own: This host.
        other: The other, after it was asked.
        run: Says which folder is shared.
        ahead_s: Seconds by which its clock is ahead.
        reach_errors: Why each of its ports was not reached from here, by setting; an empty text if it was.
    """
    name = other.advertised
    yield _clock(f"{name}: clock", ahead_s)
    yield _versions(f"{name}: versions", own, other)
    yield _shared(f"{name}: shared path", run, sees_marker=other.sees_marker)
    if own.model or other.model:
        yield _model(f"{name}: model", own.model, other.model)
    unreached = [error for error in other.reach_errors.values() if error]
    if unreached and len(unreached) == len(other.reach_errors):
        yield _unreached(f"{name}: name and port", own.advertised, unreached[0])
    else:
        yield ok(f"{name}: name and port", f"this host was reached from there as {own.advertised}")
        yield from _closed(name, "here", "from there", other.reach_errors)
    yield from _closed(name, "there", "from here", reach_errors)
    if reach_errors and not any(reach_errors.values()):
        yield ok(f"{name}: ports", f"reached there: {', '.join(reach_errors)}")


def _clock(name: str, ahead_s: float) -> Finding:
    seen = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    remedy = "have both hosts synchronise their clocks: look at `timedatectl` and `chronyc tracking`"
    if abs(ahead_s) > BROKEN_CLOCK_S:
        return fault(name, seen, remedy)
    if abs(ahead_s) > MAX_CLOCK_S:
        return warning(name, seen, remedy)
    return ok(name, "the same, within a second")


def _versions(name: str, own: HostFacts, other: HostFacts) -> Finding:
    pairs = {each: (version, other.versions.get(each, version)) for each, version in own.versions.items()}
    differing = {each: pair for each, pair in pairs.items() if len({*map(without_build, pair)}) > 1}
    if own.code != other.code:
        differing[_CODE] = (own.code, other.code)
    if differing:
        return fault(name, _told(differing), "install the same on all hosts, best in one environment that they share")
    doubtful = {each: pair for each, pair in pairs.items() if not go_together(*pair)}
    remedies = [BUILD_REMEDY] if doubtful else []
    if own.python.split(".")[:2] != other.python.split(".")[:2]:
        doubtful["Python"] = (own.python, other.python)
        remedies.append("make the environments of all hosts with the same Python")
    if doubtful:
        return warning(name, _told(doubtful), "; ".join(remedies))
    return ok(name, _told(pairs))


def _told(pairs: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(
        f"{each} {here}" if here == there else f"{each} {there} there and {here} here"
        for each, (here, there) in pairs.items()
    )


def _shared(name: str, run: RunConfig, *, sees_marker: bool) -> Finding:
    folder = shared_folder(run)
    if sees_marker:
        return ok(name, f"{folder} is the same folder")
    seen = f"a file written here into {folder} is not there"
    if run.folder is None:
        remedy = (
            "set run.dir to a folder that all hosts share; without one, copy live.toml to the other host, and do not "
            "use trainer.weight_sync.transport = 'disk'"
        )
        return warning(name, seen, remedy)
    return fault(name, seen, "set run.dir or run.folder to a folder that all hosts share under the same path")


def _model(name: str, own: str, other: str) -> Finding:
    remedy = "give model.path a folder that all hosts have, or a model on the Hugging Face Hub"
    if not own or not other:
        return fault(name, f"the folder of model.path is {'there' if other else 'here'} only", remedy)
    if own != other:
        return fault(name, "the folder of model.path has other files there than here", remedy)
    return ok(name, "the same files")


def _unreached(name: str, advertised: str, error: str) -> Finding:
    return fault(
        name,
        f"this host was not reached from there as {advertised}: {error}",
        "give --network.host=0.0.0.0 and --network.advertise_host=, a name or address under which others reach this "
        "host, and open its ports to them: engines, weights and the trainer's ranks use any free one",
    )


def _closed(name: str, where: str, whence: str, errors: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each port of one host that the other did not reach."""
    for key, error in errors.items():
        if error:
            seen = f"{key} {where} was not reached {whence}: {error}"
            yield fault(f"{name}: {key} {where}", seen, "let it through the firewalls of both hosts and between them")
