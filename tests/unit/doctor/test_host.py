"""Memory, disk and names of the machine, as `penstock doctor` judges them."""

import dataclasses

from services.doctor import memory, network
from services.doctor.finding import Status
from services.plan.host_memory import ENGINE_BYTES, OTHERS_BYTES
from tests.support.doctor import GIB, TWO_BILLION, assert_found, plan, recipe


def test_memory_of_the_machine() -> None:
    """On a CPU, weights in float32 in every engine, and all of the trainer's."""
    on_cpu = recipe("--rollout.replicas=2")
    weights = (2 * 4 + 16 + 8) * TWO_BILLION.num_parameters
    base = 2 * ENGINE_BYTES + OTHERS_BYTES
    for available, status in ((weights * 2 + base, "ok"), (weights * 1.1 + base, "warning"), (weights, "fault")):
        found = memory.check_host_memory(TWO_BILLION, on_cpu, plan(on_cpu, 0), int(available))
        assert_found(found, Status(status), "2 engines, trainer and services")
    on_gpu = recipe("--rollout.replicas=1")
    assert_found(memory.check_host_memory(TWO_BILLION, on_gpu, plan(on_gpu, 2), weights), Status.OK)


def test_shared_memory_and_disk() -> None:
    """Docker's 64 MiB of /dev/shm; three checkpoints of 24 GB where two are kept; folders that are not one's own."""
    assert_found(memory.check_shared_memory(64 * 2**20), Status.WARNING, "0.1 GiB", "--shm-size")
    assert_found(memory.check_shared_memory(None), Status.FAULT, "/dev/shm", "cannot be written to", "tmpfs")
    assert_found(memory.check_shared_memory(16 * GIB), Status.OK)
    keeps_two = recipe()
    assert_found(memory.check_disk(TWO_BILLION, keeps_two, "/runs", 60 * GIB), Status.FAULT, "67.1 GiB", "run.dir")
    assert_found(memory.check_disk(TWO_BILLION, keeps_two, "/runs", 70 * GIB), Status.OK, "67.1 GiB")
    with_reference = recipe("--algorithm.kl.kind=k3")  # which each checkpoint has too, in float32
    assert_found(memory.check_disk(TWO_BILLION, with_reference, "/runs", 80 * GIB), Status.FAULT, "89.4 GiB")
    assert_found(memory.check_disk(TWO_BILLION, with_reference, "/runs", 80 * GIB, is_sft=True), Status.OK, "67.1 GiB")
    frozen = dataclasses.replace(TWO_BILLION, num_trained=0)
    adapters = recipe("--algorithm.kl.kind=k3", "--trainer.lora.rank=8")
    assert_found(memory.check_disk(frozen, adapters, "/runs", free=GIB), Status.OK, "take 0.0 GiB")
    assert_found(memory.check_disk(None, None, "/runs", 1), Status.OK)
    assert_found(memory.check_disk(None, None, "/runs", None), Status.FAULT, "/runs cannot be written to")
    assert_found(memory.check_temporary("/tmp", None), Status.FAULT, "TMPDIR")
    assert_found(memory.check_temporary("/tmp", 1000), Status.WARNING, "TMPDIR")
    assert_found(memory.check_temporary("/tmp", 2 * GIB), Status.OK)


def test_hosts() -> None:
    """A name without an address, and one under which a machine tells others to reach themselves."""
    known = {"node1": ["10.0.0.1"], "me": ["127.0.1.1"], "nats": ["10.0.0.9"]}

    def resolve(host: str) -> list[str]:
        if host not in known:
            raise OSError(-2, "Name or service not known")
        return known[host]

    elsewhere = recipe("--bus.url=nats://nats:4222", "--worker.router_address=node1:7001", "--network.host=10.0.0.1")
    hosts = list(network.hosts_of(elsewhere))
    assert hosts == [("bus.url", "nats"), ("worker.router_address", "node1")]
    assert_found(network.check_hosts(hosts, resolve), Status.OK, "node1")
    assert list(network.hosts_of(recipe("--bus.url=nats:4222"))) == [("bus.url", "nats")]
    found = network.check_hosts([("bus.url", "nods")], resolve)
    assert_found(found, Status.FAULT, "bus.url: 'nods' has no address (Name or service not known)", "/etc/hosts")
    found = network.check_hosts([(network.OWN_NAME, "me")], resolve)
    assert_found(found, Status.WARNING, "'me', which is 127.0.1.1", "--network.advertise_host=")
    assert [key for key, _ in network.hosts_of(recipe("--network.host=0.0.0.0"))] == [network.OWN_NAME]
    assert_found(network.check_hosts([], resolve), Status.OK, "all on this machine")
