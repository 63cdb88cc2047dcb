"""docs/operation."""

from tests.docs.pages.reasons import DOCKER, HOSTS, KUBERNETES, LAYOUT, RAY, SLURM
from tests.docs.steps import Given, NotRun, Page, Run, Save, Stop

_SECURITY = "tests/integration/security/test_page.py runs it as it stands"
_TRAINS = "penstock train tiny-cpu --trainer.num_steps=5000 --run.folder=runs/going-on"
_SHORT = "penstock train tiny-cpu --trainer.num_steps=3 --run.folder=runs"

PAGES = (
    Page(
        "docs/operation/bus.md",
        Given(_TRAINS),
        Run(
            "penstock bus",
            left_out={
                "penstock bus show": "there is no dead letter: tests/integration/cli/test_bus_command.py makes some",
                "penstock bus requeue": "there is no dead letter: tests/integration/cli/test_bus_command.py makes some",
            },
        ),
        NotRun("5 GiB", "a formula"),
        NotRun("server_name", "tests/integration/bus/cluster/test_cluster.py has three servers"),
        Stop(),
        Run(
            "penstock runs list",
            left_out={"penstock runs list --url": HOSTS, "penstock runs delete --url": HOSTS},
        ),
        instead={"<run>": "runs/going-on", "runs/geo3k-20260101-120000": "--yes runs/going-on"},
        stays={"penstock train": "step "},
    ),
    Page(
        "docs/operation/deploy.md",
        NotRun("make up", DOCKER),
        NotRun("cd deploy", DOCKER),
        NotRun("PENSTOCK_ARGS", DOCKER),
        NotRun("mkdir -p deploy/runs", DOCKER),
        NotRun("make up", DOCKER),
        NotRun("COMPOSE_FILE", DOCKER),
        NotRun("echo", DOCKER),
        NotRun("COMPOSE_FILE", DOCKER),
        NotRun("COMPOSE_FILE", DOCKER),
        NotRun("PENSTOCK_PREFILL_GPUS", DOCKER),
        NotRun("COMPOSE_FILE", DOCKER),
        NotRun("FROM penstock-trainer", DOCKER),
        NotRun("services:", DOCKER),
        NotRun("docker build", DOCKER),
        NotRun("make up", DOCKER),
        NotRun("docker run", DOCKER),
        NotRun("git pull", DOCKER),
        NotRun("docker run", DOCKER),
        NotRun("docker run", DOCKER),
    ),
    Page("docs/operation/hosts.md", NotRun("penstock doctor", f"{HOSTS}: tests/integration/cli/test_doctor_hosts.py")),
    Page(
        "docs/operation/kubernetes.md",
        NotRun("(cd deploy", KUBERNETES),
        NotRun("kubectl delete", KUBERNETES),
        NotRun("helm install", KUBERNETES),
        NotRun("(cd deploy", KUBERNETES),
        NotRun("kubectl scale", KUBERNETES),
        NotRun("kubectl delete", KUBERNETES),
        NotRun("docker build", KUBERNETES),
        NotRun("helm upgrade", KUBERNETES),
        NotRun("kubectl delete", KUBERNETES),
    ),
    Page(
        "docs/operation/prometheus.md",
        Run("penstock train"),
        NotRun("penstock serve router", f"{LAYOUT}: tests/integration/rpc/test_metrics_server.py asks such a port"),
        instead={"recipes/tiny-cpu.toml": "recipes/tiny-cpu.toml --trainer.num_steps=3"},
    ),
    Page(
        "docs/operation/ray.md",
        NotRun("pip install", RAY),
        NotRun("ray job submit", RAY),
    ),
    Page(
        "docs/operation/scale.md",
        Given(_TRAINS),
        Run("penstock scale"),
        instead={"runs/NAME-START": "runs/going-on", "rollout=6": "rollout=3"},
        stays={"penstock train": "step "},
    ),
    Page(
        "docs/operation/security.md",
        NotRun("export PENSTOCK_TOKEN", "sets what the tests of the page set"),
        NotRun("curl", _SECURITY),
        NotRun("mkdir -p certs", "tests/support/certificates.py runs it as it stands"),
        NotRun("from penstock.clients", _SECURITY),
    ),
    Page(
        "docs/operation/slurm.md",
        Given("penstock init tiny-cpu recipe.toml"),
        Run("penstock slurm", left_out={"penstock slurm recipe.toml --nodes 2$": SLURM}),
        Save("# cluster.toml", "cluster.toml"),
        Given("sed -i 's|/shared/me|shared/me|' cluster.toml"),
        Run("penstock slurm recipe.toml cluster.toml"),
        NotRun("scancel", SLURM),
        instead={"--slurm.time=2:00:00": "--slurm.time=2:00:00 --dry-run"},
    ),
    Page(
        "docs/operation/tracing.md",
        Given(f"{_SHORT}/done"),
        Run("penstock view"),
        instead={"RUN": "runs/done"},
    ),
    Page(
        "docs/operation/viewing.md",
        Given(f"{_SHORT}/first"),
        Given(f"{_SHORT}/second"),
        Run("penstock view"),
        Run("penstock status"),
        instead={
            "penstock view runs": "penstock view --port=0 runs",
            "runs/tiny-cpu-<time>": "runs/first",
            "RECIPE": "tiny-cpu --trainer.num_steps=3",
            "RUN": "runs/first",
        },
        stays={"penstock view --port=0": "http://"},
    ),
)
