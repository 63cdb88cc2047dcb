"""What Helm refuses in the values of the chart, before anything is installed. Part of `make test-helm`."""

import json
import re
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from penstock import config as configuration
from penstock import shipped
from services.recipe import Recipe
from tests.helm.cases import TEXT
from tests.helm.chart import CHART, containers, render

MISTYPED = {
    "replica": {"router": {"replica": 2}},
    "gpu": {"rollout": {"pools": {"unified": {"gpu": 1}}}},
    "role": {"rollout": {"pools": {"unified": {"role": "prefil"}}}},
    "memory": {"trainer": {"resources": {"limits": {"memory": "96gb"}}}},
    "settings": {"settings": ["--trainer.num_steps=5"]},
    "text": {"recipe": {"txt": "x"}},
    "url": {"nats": {"enabled": False}},
    "nats.url": {"nats": {"enabled": False, "url": "nats://a:4222,b:4222"}},
    "remoteToken": {"secrets": {"remoteToken": True}},
    "mountedByEngines": {"runs": {"mountedByEngines": True}},
    "missing property 'worker'": {"worker": None},
    "missing property 'defaults'": {"rollout": {"defaults": None}},
    "missing property 'resources'": {"trainer": {"resources": None}},
    "prefill and decode": {"rollout": {"pools": {"unified": {"role": "decode"}}}},
}


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_value_is_named(name: str) -> None:
    """Before anything is installed."""
    with pytest.raises(helm_python.HelmError) as refused:
        render(MISTYPED[name])
    assert "missing property" not in name or name in str(refused.value)
    where = next(iter(MISTYPED[name]))
    assert name in str(refused.value) or where in str(refused.value)
    assert where in str(refused.value)


MISTYPED_OBJECTS: list[tuple[dict[str, Any], str, str]] = [
    ({"router": {"env": [{"name": "A", "vlaue": "1"}]}}, "/router/env/0", "vlaue"),
    (
        {"trainer": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "kee": "b"}}}]}},
        "/trainer/env/0/valueFrom/secretKeyRef",
        "kee",
    ),
    ({"worker": {"volumes": [{"name": "a", "emptydir": {}}]}}, "/worker/volumes/0", "emptydir"),
    (
        {"nats": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimNam": "b"}}]}},
        "/nats/volumes/0/persistentVolumeClaim",
        "claimNam",
    ),
    ({"worker": {"volumeMounts": [{"name": "a", "mountpath": "/a"}]}}, "/worker/volumeMounts/0", "mountpath"),
    ({"rollout": {"defaults": {"tolerations": [{"kee": "a"}]}}}, "/rollout/defaults/tolerations/0", "kee"),
    (
        {"rollout": {"pools": {"unified": {"affinity": {"nodeAfinity": {}}}}}},
        "/rollout/pools/unified/affinity",
        "nodeAfinity",
    ),
    ({"reward": {"allowFrom": [{"podSelector": {"matchLabel": {}}}]}}, "/reward/allowFrom/0/podSelector", "matchLabel"),
    ({"monitoring": {"allowFrom": [{"pod": {}}]}}, "/monitoring/allowFrom/0", "pod"),
    ({"networkPolicy": {"egress": {"worker": [{"too": []}]}}}, "/networkPolicy/egress/worker/0", "too"),
]


@pytest.mark.parametrize(("values", "place", "name"), MISTYPED_OBJECTS, ids=[name for *_, name in MISTYPED_OBJECTS])
def test_a_mistyped_name_in_an_object_of_kubernetes_is_named(values: dict[str, Any], place: str, name: str) -> None:
    """With its place, before anything is installed."""
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert f"'{place}'" in str(refused.value)
    assert f"'{name}'" in str(refused.value)


VERSION = "1.37"
OPEN_VOLUME = {"type": ["object", "null"]}
"""What the schema says of kinds of volume whose forms it leaves out."""
FORMS = r"io\.k8s\.(api\.(core|networking)\.v1|apimachinery)\."
"""Where Kubernetes defines what the values may have; other groups have objects of the same names."""


def test_the_schema_has_kubernetes_own_forms() -> None:
    """What of them is copied into values.schema.json has no name more and none less."""
    listed = kubernetes_validate.utils.schema_contents(
        f"kubernetes-json-schema/v{VERSION}.0-local-strict/_definitions.json", VERSION
    )["$defs"]
    forms = {name.rpartition(".")[2]: form for name, form in listed.items() if re.match(FORMS, name)}
    copied = json.loads((CHART / "values.schema.json").read_text())["definitions"]
    kinds = {name for name in copied if name[0].isupper()}
    assert {"EnvVar", "Volume", "NetworkPolicyPeer"} <= kinds
    for name in kinds:
        wanted = copied_form(forms[name])
        if name == "Volume":
            own = copied[name]["properties"]
            for key in wanted["properties"].keys() & own.keys():
                if own[key] == OPEN_VOLUME:
                    wanted["properties"][key] = OPEN_VOLUME
        assert copied[name] == wanted, name


def copied_form(form: Any) -> Any:
    """A definition of Kubernetes as the schema of the values has it: without descriptions, and with its references."""
    if isinstance(form, list):
        return [copied_form(each) for each in form]
    if not isinstance(form, dict):
        return form
    if "$ref" in form:
        return {"$ref": f"#/definitions/{form['$ref'].rpartition('.')[2]}"}
    return {
        key: copied_form(value)
        for key, value in form.items()
        if not key.startswith("x-") and not (key in ("description", "default", "format") and isinstance(value, str))
    }


TENSOR_PARALLEL = ["rollout.tensor_parallel=2"]
FOUR_RANKS = {"settings": ["trainer.ranks=4"]}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"rollout": {"defaults": {"gpus": 1}}},
        "rollout.defaults.gpus = 1 and trainer.gpus = 0: engines hold bfloat16, and the trainer pushes float32, which "
        "they refuse; give GPUs to both or neither, or add rollout.dtype=bfloat16 and trainer.dtype=bfloat16 to",
    ),
    (
        {"rollout": {"pools": {"big": {"gpus": 1}}}, "trainer": {"gpus": 1}},
        "rollout.defaults.gpus = 0 and trainer.gpus = 1: engines hold float32, and the trainer pushes bfloat16",
    ),
    (
        {"rollout": {"defaults": {"gpus": 1}}, "trainer": {"gpus": 1, "settings": ["trainer.device='cpu'"]}},
        "rollout.defaults.gpus = 1 and trainer.gpus = 1: engines hold bfloat16, and the trainer pushes float32",
    ),
    (
        {"recipe": {"text": TEXT}, "settings": ["rollout.dtype=bfloat16"]},
        "engines hold bfloat16, and the trainer pushes float32",
    ),
    (
        {"rollout": {"pools": {"unified": {"gpus": 4}}}, "trainer": {"gpus": 1}},
        "rollout.pools.unified.gpus = 4, but rollout.tensor_parallel = 1; they must be the same: add "
        "rollout.tensor_parallel=4 to its `settings`",
    ),
    (
        {"rollout": {"defaults": {"gpus": 1, "settings": TENSOR_PARALLEL}}, "trainer": {"gpus": 1}},
        "rollout.defaults.gpus = 1, but rollout.tensor_parallel = 2",
    ),
    (
        {"recipe": {"text": TEXT}, "rollout": {"defaults": {"gpus": 1}}, "trainer": {"gpus": 8, **FOUR_RANKS}},
        "trainer.gpus = 8, but trainer.ranks = 4; they must be the same: add trainer.ranks=8 to its `settings`",
    ),
    (
        {"reward": {"autoscaling": {"minReplicas": 9}}},
        "reward.autoscaling: minReplicas = 9 is above maxReplicas = 8; lower it, or raise maxReplicas",
    ),
]


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS)
def test_values_that_contradict_each_other_are_named(values: dict[str, Any], words: str) -> None:
    """With both values and what to change, before anything is installed."""
    with pytest.raises(helm_python.HelmError, match=re.escape(words)):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"rollout": {"defaults": {"gpus": 1}}, "settings": ["rollout.dtype=float32"]},
        {"rollout": {"defaults": {"gpus": 1}}, "trainer": {"settings": ["trainer.dtype='bfloat16'"]}},
        {"rollout": {"defaults": {"gpus": 1}}, "recipe": {"text": '[rollout]\ndtype = "float32"\n'}},
        {"rollout": {"defaults": {"gpus": 1}}, "trainer": {"enabled": False}},
        {"rollout": {"defaults": {"gpus": 2}}, "trainer": {"gpus": 1}, "settings": TENSOR_PARALLEL},
        {"rollout": {"defaults": {"gpus": 2}}, "trainer": {"gpus": 4}, "recipe": {"text": TEXT}},
        {"trainer": FOUR_RANKS},
        {"reward": {"autoscaling": {"enabled": False, "minReplicas": 9}}},
    ],
)
def test_values_that_agree_are_taken(values: dict[str, Any]) -> None:
    """Also where only the recipe can tell, which Helm does not read: the processes compare what it says."""
    render(values)


def test_recipes_that_come_with_penstock_leave_out_what_the_chart_compares() -> None:
    """Its templates take them to have the defaults."""
    for file in shipped.recipes().values():
        loaded = configuration.load(Recipe, [file], [])
        assert (loaded.rollout.tensor_parallel, loaded.trainer.ranks) == (1, 1), file
        assert {loaded.rollout.dtype, loaded.trainer.dtype, loaded.trainer.device} == {"auto"}, file


@pytest.mark.parametrize(
    "place", ["", "reward", "router", "rollout.defaults", "rollout.pools.unified", "worker", "trainer"]
)
def test_a_mistyped_name_in_a_list_of_settings_is_named(place: str) -> None:
    """With its place, and the names that its section has."""
    values: dict[str, Any] = {"settings": ["trainer.num_stepz=5"]}
    for name in reversed(place.split(".") if place else []):
        values = {name: values}
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    said = str(refused.value)
    assert "/".join((*filter(None, place.split(".")), "settings/0")) in said
    assert "trainer.num_stepz=5" in said
    assert "(num_steps|" in said


@pytest.mark.parametrize(
    ("place", "setting"),
    [
        ("trainer", "trainer.float32_head=true"),
        ("trainer", "trainer.weight_sync={stage_timeout_s=60}"),
        ("worker", "bus.lease_ttl_s=20"),
        ("rollout.defaults", "sampling.temperature=0.7"),
        ("rollout.pools.unified", "rollout.context_length=4096"),
    ],
)
def test_a_setting_that_several_processes_read_is_given_to_all(place: str, setting: str) -> None:
    """In one process's list it would do nothing, or half."""
    values: dict[str, Any] = {"settings": [setting]}
    assert f"--{setting}" in [argument for _, each in containers(render(values)) for argument in each.get("args", [])]
    for name in reversed(place.split(".")):
        values = {name: values}
    with pytest.raises(helm_python.HelmError, match=re.escape(f"{place}.settings has {setting}, ")):
        render(values)
