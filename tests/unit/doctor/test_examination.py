"""Which checks `penstock doctor` makes of a recipe, and what it says when one fails."""

import dataclasses
from collections.abc import Iterator

import pytest

from services.doctor import examination, gpu
from services.doctor.examination import checks_of
from services.doctor.finding import Finding, Status, ok
from tests.support.doctor import GIB, H100, TWO_BILLION, assert_found, facts, recipe


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU of 80 GiB and an NCCL that cannot share it, and a model of two billion parameters."""
    monkeypatch.setattr(examination, "find_gpus", lambda: ["0"])
    monkeypatch.setattr(gpu, "probe_gpus", lambda: facts(H100, nccl=(2, 29, 3)))
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    monkeypatch.setattr(examination, "memory_here", lambda: 64 * GIB)


@pytest.mark.usefixtures("one_gpu")
def test_supervised_training_has_the_gpu_to_itself() -> None:
    """No engine takes 85% of it, and nobody else is in an NCCL group; a whole run of the same recipe does not fit."""

    def statuses(*, is_sft: bool) -> dict[str, Status]:
        checks = {check.name: check for check in checks_of(recipe("--sampling.top_p=0.9"), is_sft=is_sft)}
        looks = [*checks["GPUs"].look(), *checks["memory"].look(), *checks["settings"].look()]
        return {finding.name: finding.status for finding in looks if finding is not None}

    whole, supervised = statuses(is_sft=False), statuses(is_sft=True)
    assert {name for name, status in whole.items() if status is Status.FAULT} >= {"NCCL", "trainer's GPU", "settings"}
    on_test_machine = {"disk", "temporary files"}
    assert {status for name, status in supervised.items() if name not in on_test_machine} == {Status.OK}
    assert supervised.keys() >= {"trainer's GPU", "memory", "settings"}
    assert not supervised.keys() & {"NCCL", "engine's GPU", "attention", "shared memory"}


@pytest.mark.parametrize("is_sft", [False, True])
def test_a_trainer_that_must_have_a_gpu_is_a_fault_without_one(monkeypatch: pytest.MonkeyPatch, is_sft: bool) -> None:
    """Of a whole run, and of supervised training."""
    monkeypatch.setattr(examination, "find_gpus", list)
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    checks = {check.name: check for check in checks_of(recipe("--trainer.device=cuda"), is_sft=is_sft)}
    [found] = [each for each in checks["memory"].look() if each is not None and each.name == "plan"]
    assert_found(found, Status.FAULT, "trainer.device = 'cuda'", "no GPU", "set it to 'auto' or 'cpu'")


def test_a_run_of_several_hosts_need_not_fit_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and Ray divide it among hosts; what no number of GPUs helps stays a fault."""
    monkeypatch.setattr(examination, "find_gpus", lambda: [str(number) for number in range(8)])
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    large = ("--trainer.ranks=8", "--rollout.replicas=8")

    def looks_like(name: str, *settings: str, is_sft: bool = False) -> Finding:
        checks = {check.name: check for check in checks_of(recipe(*settings), is_sft=is_sft)}
        return next(found for found in checks["memory"].look() if found is not None and found.name == name)

    assert_found(looks_like("plan", *large), Status.FAULT, "8 engines", "need 16 GPUs, and 8 can be used")
    found = looks_like("plan", *large, "--slurm.gpus_per_node=8")
    assert_found(found, Status.WARNING, "this host alone", "need 16 GPUs", "penstock slurm --dry-run")
    found = looks_like("plan", *large, "--launch.backend=ray")
    assert_found(found, Status.WARNING, "this host alone", "need 16 GPUs", "penstock train")
    assert_found(
        looks_like("plan", *large, "--launch.backend=ray", "--metrics.port=9"), Status.FAULT, "metrics.port = 9"
    )
    assert_found(
        looks_like("plan", "--trainer.ranks=9", "--slurm.gpus_per_node=8", is_sft=True), Status.FAULT, "need 9 GPUs"
    )
    monkeypatch.setattr(examination, "find_gpus", list)  # a login node
    monkeypatch.setattr(examination, "memory_here", lambda: GIB)
    assert_found(looks_like("memory", *large), Status.FAULT, "of the 1.0 GiB")
    found = looks_like("memory", *large, "--slurm.gpus_per_node=8")
    assert_found(found, Status.WARNING, "this host alone", "of the 1.0 GiB")


def test_gpus_that_torch_does_not_see_are_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one of them, of which nothing can be said; what was found before is told all the same."""
    monkeypatch.setattr(examination, "find_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(gpu, "probe_gpus", lambda: facts(H100))
    monkeypatch.setattr(examination, "check_model", lambda recipe: (ok("model", "large"), TWO_BILLION))
    check = next(check for check in checks_of(recipe(), is_sft=False) if check.name == "GPUs")
    found = [finding for finding in check.look() if finding is not None]
    assert Status.FAULT in {finding.status for finding in found}

    def looks_and_breaks() -> Iterator[Finding | None]:
        yield found[0]
        raise KeyError("1")

    look = examination._Look(dataclasses.replace(check, look=looks_and_breaks))
    look.thread.join()
    assert [finding.name for finding in look.findings()] == [found[0].name, "GPUs"]
    assert "the check itself failed" in look.findings()[1].seen
