"""The rendered pods, started by podman: a release on a network of its own, of which nothing is left afterwards.

`podman kube play` knows Pods, claims, ConfigMaps and Secrets. What makes Pods of a StatefulSet, Deployment or Job in
a cluster is done here: pods named like their Service, so that its name leads to them, and copies with numbers.

What Kubernetes does and podman 4.3 does not is left out or replaced (`_pod_of`): probes (`Release.is_ready` asks what
the readiness probe asks, from inside the pod), ports, the pod's own address (its name stands for it, which podman
resolves) and the volume of /dev/shm (podman makes a folder of root's of it on the disk; every pod has 1 GiB of memory
there).
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.compose.stack import SERVICES
from tests.helm.cases import ROOT
from tests.helm.chart import Object, component, of_kind, render, workloads

REGISTRY = "localhost"
"""Where podman has the images that it built."""
_POLL_S = 0.5
_CONF = """\
[containers]
log_driver = "k8s-file"
shm_size = "1g"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "as-it-may"
[engine.runtimes]
as-it-may = ["{runtime}"]
"""
"""Without systemd, and with a runtime that works in a container, too."""


_PROGRAMS = ("podman", "runc", "netavark", "aardvark-dns", "catatonit")
_STORAGE = Path("/var/lib/containers")
"""Where root's podman has its images and volumes."""
_BUILD_GB, _REBUILD_GB = 25, 12
"""Free disk that the images take while they are built: at first, and where they are there."""


def missing() -> str:
    """Why pods cannot be started here; empty: they can."""
    if os.geteuid() != 0:
        return "the pods are started by root, whose podman has networks of its own"
    for name in _PROGRAMS:
        if not _found(name):
            return f"no {name}: apt-get install {' '.join(_PROGRAMS)}"
    place = next(path for path in (_STORAGE, *_STORAGE.parents) if path.exists())
    needed_gb = _REBUILD_GB if _has_images() else _BUILD_GB
    free_gb = shutil.disk_usage(place).free / 1e9
    if free_gb < needed_gb:
        return f"{place} has {free_gb:.0f} GB free, and building the images takes {needed_gb} GB: make room"
    return ""


def _has_images() -> bool:
    names = [f"{REGISTRY}/penstock-{service}" for service in SERVICES]
    return all(_run(["podman", "image", "exists", name], check=False).returncode == 0 for name in names)


def _found(name: str) -> bool:
    return shutil.which(name) is not None or any(
        (Path(folder) / name).exists() for folder in ("/usr/lib/podman", "/usr/libexec/podman")
    )


@dataclass(frozen=True, slots=True)
class Podman:
    """Podman with settings of its own."""

    folder: Path
    """Has its settings. What it has started reads them again, so it must not be removed before."""

    @classmethod
    def in_folder(cls, folder: Path) -> "Podman":
        """Write the settings into a folder."""
        runtime = folder / "runtime"
        # A build asks for the state of its containers ten times a second.
        asked = '[ "$1" = state ] && exec runc "$@"'
        program = Path(__file__).with_name("runtime.py")
        runtime.write_text(f'#!/bin/sh\n{asked}\nexec {sys.executable} -I {program} "$@"\n')
        runtime.chmod(0o755)
        (folder / "containers.conf").write_text(_CONF.format(runtime=runtime))
        return cls(folder)

    def __call__(self, *arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run podman and return its standard output."""
        return self.done(*arguments, check=check, timeout_s=timeout_s).stdout

    def done(self, *arguments: str, check: bool = True, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run podman and return all that it said."""
        environment = {**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        return _run(["podman", *arguments], environment=environment, check=check, timeout_s=timeout_s)

    def build_images(self) -> None:
        """Build all images, anew where something has changed; BASE_IMAGE is below them, as in the compose stack."""
        base = os.environ.get("BASE_IMAGE", "")
        arguments = ["--build-arg", f"BASE_IMAGE={base}"] if base else []
        for service in SERVICES:
            file = f"deploy/docker/{service}.Dockerfile"
            self("build", "--quiet", "--tag", f"penstock-{service}", "--file", file, *arguments, ".", timeout_s=3000)


@dataclass(slots=True)
class Release:
    """Objects of the chart, and the pods that run of them."""

    podman: Podman
    name: str
    folder: Path
    objects: list[Object]
    pods: list[str] = field(default_factory=list)
    claims: set[str] = field(default_factory=set)
    """Those that podman has."""

    def play(self, workload: str, *, pod: str = "") -> str:
        """Start a pod of a Deployment, StatefulSet or Job; returns its name: by default the workload's."""
        owner, name = self.owner(workload), self.full(pod or workload)
        claims = [each for each in _claims(self.objects, owner) if each["metadata"]["name"] not in self.claims]
        self.claims |= {each["metadata"]["name"] for each in claims}
        documents = [*of_kind(self.objects, "ConfigMap"), *claims, _pod_of(owner, name)]
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        self.pods.append(name)
        self.podman("kube", "play", "--network", self.name, str(file), timeout_s=300)
        return name

    def full(self, name: str) -> str:
        """The name as the release has it: demo-router for router."""
        return f"{self.name}-{name}"

    def owner(self, pod: str) -> Object:
        """The workload whose template the pod is made of."""
        name = self.full(pod)
        return next(each for each in workloads(self.objects) if name.startswith(each["metadata"]["name"]))

    def container(self, pod: str) -> str:
        """The pod's container that is no init container, as podman names it."""
        return f"{self.full(pod)}-{component(self.owner(pod))}"

    def inspect(self, pod: str) -> dict[str, Any]:
        """What podman knows of the pod's container."""
        found: dict[str, Any] = json.loads(self.podman("inspect", self.container(pod)))[0]
        return found

    def is_ready(self, pod: str) -> bool:
        """Whether its readiness probe, asked inside the pod, succeeds."""
        probe = self.owner(pod)["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
        if "grpc" in probe:
            command = ["python3", "-m", "penstock.runtime.health", f"127.0.0.1:{probe['grpc']['port']}"]
        else:
            command = probe["exec"]["command"]
        return self.execute(pod, *command, check=False).returncode == 0

    def execute(self, pod: str, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command in the pod's container."""
        return self.podman.done("exec", self.container(pod), *command, check=check)

    def crash(self, pod: str) -> None:
        """kill -9 of the pod's process, as of one that is out of memory."""
        process = int(self.inspect(pod)["State"]["Pid"])
        assert process > 0, f"{pod} does not run\n{self.logs()}"  # 0 would be this test itself
        os.kill(process, signal.SIGKILL)

    def end(self, pod: str) -> int:
        """End a pod in order, as a Deployment that shrinks does; returns the exit code of its process."""
        # The container alone: `pod stop` may end the one first that holds the processes, and so kill them.
        self.podman("stop", "--time", "60", self.container(pod), timeout_s=120)
        code = int(self.inspect(pod)["State"]["ExitCode"])
        self.podman("pod", "rm", "--force", self.full(pod))
        self.pods.remove(self.full(pod))
        return code

    def lose(self, pod: str) -> None:
        """Remove a pod at once, without SIGTERM.

        The kernel still closes the connections of its killed processes, as no node does that dies.
        """
        name = self.full(pod)
        done = self.podman.done("pod", "rm", "--force", "--time", "0", name, check=False)
        is_gone = self.podman.done("pod", "exists", name, check=False).returncode == 1
        assert is_gone, f"podman pod rm ended with {done.returncode}, and {name} is there:\n{done.stdout}{done.stderr}"
        self.pods.remove(name)

    def rows(self, run: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Finished steps of the run, out of its claim."""
        mounted = self.podman(
            "volume", "inspect", "--format", "{{.Mountpoint}}", self.full("runs"), check=False
        ).strip()
        path = Path(mounted) / run / file
        if not mounted or not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def logs(self) -> str:
        """The end of what all pods have said, for a failed assertion."""
        said = [self.podman.done("pod", "logs", "--tail", "15", pod, check=False) for pod in self.pods]
        return "\n".join(each.stdout + each.stderr for each in said)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Wait for something; returns how many seconds it took."""
        started = time.monotonic()
        while not holds():
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"waited for {what}: not within {timeout_s} s\n{self.logs()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started


@contextlib.contextmanager
def release(podman: Podman, values: Mapping[str, Any]) -> Iterator[Release]:
    """The chart's objects with `values`; at the end its pods, volumes, secrets and network are removed."""
    name = f"pt-{uuid.uuid4().hex[:8]}"
    image = {"registry": REGISTRY, "tag": "latest", "pullPolicy": "Never"}
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        tested = Release(podman, name, Path(folder), render({**values, "image": image}, release=name))
        podman("network", "create", name)
        try:
            for secret in of_kind(tested.objects, "Secret"):
                file = Path(folder) / "secret.yaml"
                file.write_text(yaml.safe_dump(secret))
                podman("secret", "create", secret["metadata"]["name"], str(file))
            yield tested
        finally:
            for pod in tested.pods:
                podman("pod", "rm", "--force", "--time", "5", pod, check=False)
            for secret in of_kind(tested.objects, "Secret"):
                podman("secret", "rm", secret["metadata"]["name"], check=False)
            for volume in podman("volume", "ls", "--quiet", "--filter", f"name={name}").split():
                podman("volume", "rm", "--force", volume, check=False)
            podman("network", "rm", "--force", name)


def leftovers(podman: Podman, name: str) -> list[str]:
    """What podman still has of a release."""
    found = podman("network", "ls", "--quiet", "--filter", f"name={name}").split()
    found += podman("volume", "ls", "--quiet", "--filter", f"name={name}").split()
    return found + podman("ps", "--all", "--quiet", "--filter", f"name={name}").split()


def _claims(objects: list[Object], owner: Object) -> list[Object]:
    """The claims that a workload's pods mount, those of a StatefulSet's template included."""
    made = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"{owner['metadata']['name']}-{each['metadata']['name']}"},
            "spec": each["spec"],
        }
        for each in owner["spec"].get("volumeClaimTemplates", [])
    ]
    wanted = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in owner["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    claims = of_kind(objects, "PersistentVolumeClaim")
    return made + [each for each in claims if each["metadata"]["name"] in wanted]


def _pod_of(owner: Object, name: str) -> Object:
    """The Pod that a controller would make of its template."""
    template = copy.deepcopy(owner["spec"]["template"])
    spec = template["spec"]
    for each in owner["spec"].get("volumeClaimTemplates", []):
        volume = each["metadata"]["name"]
        claim = f"{owner['metadata']['name']}-{volume}"
        spec["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
    for container in spec["containers"]:
        container["args"] = [each.replace("$(POD_IP)", name) for each in container.get("args", [])]
        container["env"] = [each for each in container["env"] if each["name"] != "POD_IP"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            del container[probe]
        if not container["args"]:
            del container["args"]
        container.pop("ports", None)  # podman publishes them on the host, where several pods have the same
        container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "shm"]
        for mount in container["volumeMounts"]:
            mount["name"] = f"{name}-{mount['name']}"
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "shm"]
    for volume in spec["volumes"]:
        volume["name"] = f"{name}-{volume['name']}"  # else podman gives all pods the same emptyDir
        if "secret" in volume:
            volume["secret"].setdefault("optional", False)  # podman panics without
    # Podman starts an init container again that has ended with 0, where the policy is Always.
    spec.setdefault("restartPolicy", "OnFailure" if "initContainers" in spec else "Always")
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _run(
    command: list[str], *, environment: Mapping[str, str] | None = None, check: bool = True, timeout_s: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode != 0:
        told = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{told}")
    return done
