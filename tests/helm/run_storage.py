"""What the chart's pods keep, read and must not touch: claims, models, secrets, users. Part of `make test-helm`."""

import base64
import json
import re

from penstock import config as configuration
from penstock import shipped
from services.recipe import Recipe
from tests.helm.cases import CASES, CLAIMS, ROOT
from tests.helm.chart import Object, component, containers, of_kind, render, workloads


def test_nats_keeps_its_streams_in_the_claim() -> None:
    """Which holds the bounds of a run's streams, 5 GiB, and the groups from one checkpoint to the next, each of the
    largest size (docs/operation/bus.md): a full disk stops a run."""
    (nats,) = of_kind(render(), "StatefulSet")
    (claim,) = nats["spec"]["volumeClaimTemplates"]
    (folder,) = re.findall(
        r'^  store_dir: "(.*)"', (ROOT / "deploy" / "docker" / "nats.conf").read_text(), re.MULTILINE
    )
    (container,) = nats["spec"]["template"]["spec"]["containers"]
    assert {"name": claim["metadata"]["name"], "mountPath": folder} in container["volumeMounts"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    for recipe in shipped.recipes().values():
        trainer = configuration.load(Recipe, [recipe], []).trainer
        num_groups = (trainer.checkpoint_every + trainer.max_staleness + 1) * trainer.groups_per_step
        assert int(size.removesuffix("Gi")) > 5 + num_groups * 32 / 1024, recipe.name


def test_models_and_data_are_read_only_and_the_hub_is_not_asked() -> None:
    """Where the values say so."""
    for values, hub in ((CLAIMS, {"offline": True}), ({}, {"offline": False})):
        for name, container in containers(render(values)):
            mounts = {mount["name"]: mount for mount in container.get("volumeMounts", [])}
            for folder in mounts.keys() & {"models", "datasets"}:
                assert mounts[folder]["readOnly"]
            if "hf" in mounts:
                assert mounts["hf"].get("readOnly", False) == hub["offline"]
                assert {"name": "HF_HUB_OFFLINE", "value": str(int(hub["offline"]))} in container["env"]
            elif container["name"] == name:
                assert name in ("nats", "reward")


def test_every_claim_that_pods_use_is_made_or_given() -> None:
    """A pod whose claim nobody makes never starts."""
    given = {"models", "data", "hub", "runs"}
    engines = {
        "trainer": {"enabled": False},
        "runs": {"mountedByEngines": True, "accessModes": ["ReadWriteMany"]},
    }
    for values in (engines, {}, CLAIMS):
        objects = render(values)
        made = {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for workload in workloads(objects)
            for volume in workload["spec"]["template"]["spec"].get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        assert used - (given if values is CLAIMS else set()) <= made


def test_results_outlive_the_release() -> None:
    """`helm uninstall` keeps the claim of the runs; a claim of one's own is used in its place."""
    (claim,) = of_kind(render(), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert of_kind(render(CLAIMS), "PersistentVolumeClaim") == []
    (job,) = of_kind(render(CLAIMS), "Job")
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in job["spec"]["template"]["spec"][
        "volumes"
    ]


SECRETS = {
    "nats": {"nats-token"},
    "reward": {"token"},
    "router": {"token", "nats-token", "control-token"},
    "rollout": {"token", "nats-token", "control-token"},
    "worker": {"token", "nats-token"},
    "trainer": {"token", "nats-token", "control-token"},
}


def test_secrets_are_files_of_those_who_need_them() -> None:
    """Neither arguments nor variables hold one, and no other object does."""
    objects = render(CASES["monitored"])
    (secret,) = of_kind(objects, "Secret")
    tokens = [base64.b64decode(value).decode() for value in secret["data"].values()]
    assert len({*tokens}) == 3
    assert min(map(len, tokens)) >= 32
    others = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert not [value for value in [*tokens, *secret["data"].values()] if value in others]
    more = {"reward": {"remote-token"}, "worker": {"environment-token"}}
    for values, given in (({}, {}), (CLAIMS, more)):
        for each in workloads(render(values)):
            spec = each["spec"]["template"]["spec"]
            wanted = SECRETS[component(each)] | given.get(component(each), set())
            (volume,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "secrets"]
            assert {item["key"] for item in volume["items"]} == wanted
            assert volume["defaultMode"] == 0o440
            assert volume["secretName"] == ("tokens" if values else "demo-secrets")
            (container,) = spec["containers"]
            variables = {
                env["name"]: env.get("value") for env in container["env"] if env["name"].startswith("PENSTOCK_")
            }
            (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "secrets"]
            assert variables == {f"PENSTOCK_{key.upper().replace('-', '_')}_FILE": f"{folder}/{key}" for key in wanted}
            for other in [*spec.get("initContainers", []), container]:
                assert "secretKeyRef" not in json.dumps(other)
                assert "secretRef" not in json.dumps(other)
                assert "token" not in json.dumps(other.get("args", []))


def test_nothing_runs_as_root_or_writes_where_it_should_not(objects: list[Object]) -> None:
    """What the restricted profile of Pod Security Standards asks for, and a read-only root; no token of the cluster."""
    for each in workloads(objects):
        spec = each["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert min(spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")) > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])
    for _, container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
