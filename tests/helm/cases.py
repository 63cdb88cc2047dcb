"""Values that the tests render the chart with, and the ports of its processes."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "recipes" / "tiny-cpu.toml").read_text()
TLS = {"tls": {"secret": "penstock-tls", "mutual": True}}
ELSEWHERE = {"nats": {"enabled": False, "url": "nats://nats.bus.svc:4333"}}
CLUSTER = {
    "nats": {"enabled": False, "url": "tls://a.bus.svc,tls://b.bus.svc:4333,tls://c.bus.svc:4222"},
    "settings": ["bus.replicas=3"],
}
PAIRS = {
    "rollout": {
        "pools": {
            "unified": None,
            "prefill": {"role": "prefill", "gpus": 2, "settings": ["rollout.tensor_parallel=2"]},
            "decode": {"role": "decode", "replicas": 4, "gpus": 1, "nodeSelector": {"gpu": "h200"}},
        }
    },
    "trainer": {"gpus": 1},
}
CLAIMS = {
    "models": {"existingClaim": "models"},
    "data": {"existingClaim": "data"},
    "huggingFace": {"existingClaim": "hub", "offline": True, "tokenSecret": "hub"},
    "runs": {"existingClaim": "runs", "mountedByEngines": True},
    "secrets": {"existing": "tokens", "remoteToken": True, "environmentToken": True},
}
EVERYTHING = {
    **CLAIMS,
    **TLS,
    "recipe": {"text": TEXT},
    "run": "second",
    "settings": ["trainer.num_steps=7"],
    "image": {"registry": "registry.example.com/team", "tag": "v2", "pullSecrets": ["pull"]},
    "router": {
        "replicas": 2,
        "settings": ["router.balancing=consistent_hash"],
        "allowFrom": [{"podSelector": {"matchLabels": {"agent": "yes"}}}],
        "env": [{"name": "EXTRA", "value": "1"}],
        "podLabels": {"team": "a"},
        "podAnnotations": {"note": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "reward": {"autoscaling": {"enabled": False}, "replicas": 3},
    "rollout": {"defaults": {"gpus": 1}},
    "trainer": {"gpus": 4, "settings": ["trainer.ranks=4"], "jobLabels": {"kueue.x-k8s.io/queue-name": "research"}},
    "monitoring": {"serviceMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"internet": False, "egress": {"reward": [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}]}]}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recipe": {"recipe": {"text": TEXT}},
    "tls": TLS,
    "elsewhere": ELSEWHERE,
    "cluster": CLUSTER,
    "pairs": PAIRS,
    "claims": CLAIMS,
    "everything": EVERYTHING,
    "monitored": {"monitoring": {"serviceMonitor": True, "rules": True}},
    "commented out": {  # a name whose lines are all comments
        "settings": None,
        "spreadOver": None,
        "image": {"pullSecrets": None},
        "router": {"settings": None, "allowFrom": None},
        "trainer": {"jobLabels": None},
        "networkPolicy": {"egress": None},
        "monitoring": {"labels": None},
    },
    "serving": {"trainer": {"enabled": False}, "networkPolicy": {"enabled": False}},
}
PORTS = {
    "nats": {4222},
    "reward": {7002, 7003, 9400},
    "router": {7001, 7080, 9400},
    "rollout": {7010, 9400},
    "worker": {7004, 9400},
    "trainer": {7000, 9400},
}
