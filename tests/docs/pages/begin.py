"""The pages that newcomers read first."""

from tests.docs.pages.reasons import GPUS, INSTALLS, SLURM
from tests.docs.steps import Given, NotRun, Page, Run, Save, Shows, Stop

_EVALUATED = "--evaluation.sets.geometry.num_prompts=8 --evaluation.sets.held_out.num_prompts=8"
_NEWEST = "$(ls -d runs/tiny-cpu-2* | tail -1)"
_SERVING = "server.started"
_COUNTS = r"\d+ (?:failed|passed)"
_ON_TWO_NODES = "needs root, and changes this machine's network: tests/e2e/run_two_nodes.py runs it"
_PRINTED = "printed by commands that tests/e2e/run_two_nodes.py runs"

README = Page(
    "README.md",
    NotRun("make demo", "two lines of ten minutes and more; the commands below run the demo's recipe"),
    Given("python -m tests.docs.rows train.parquet"),
    Run(
        "penstock doctor tiny-cpu",
        left_out={
            "penstock train slime-geo3k-grpo": GPUS,
            "penstock slurm": SLURM,
        },
    ),
    Stop(),
    Run("source .venv", left_out={"source": "the commands are on the path"}),
    Stop(),
    Run("pip install", left_out={"pip": INSTALLS}),
    Run("curl"),
    Run("import asyncio"),
    instead={
        "--model.path=MODEL": "--model.path=models/tiny-qwen3-vl",
        "penstock train recipes/tiny-cpu.toml": "penstock train recipes/tiny-cpu.toml"
        " --trainer.num_steps=3 --trainer.record_groups=true",
        # It trains while others look at it, and keeps the checkpoint that `penstock eval` loads.
        "--resume runs/tiny-cpu-<time>": f"--resume {_NEWEST} --trainer.num_steps=5000 --trainer.keep_checkpoints=1000",
        "runs/tiny-cpu-<time>": _NEWEST,
        "penstock eval recipes/tiny-cpu.toml": f"penstock eval recipes/tiny-cpu.toml {_EVALUATED}",
        "penstock sft recipes/tiny-sft-cpu.toml": "penstock sft recipes/tiny-sft-cpu.toml --trainer.num_steps=3"
        " --trainer.optimizer.warmup_steps=0",
        "--step 20": "--step 2",
    },
    stays={
        "penstock train --resume": "step ",
        "penstock view": "http://",
        "penstock serve nats": "",
        "penstock serve reward": _SERVING,
        "penstock serve router": "",
        "penstock serve rollout": "",
        "penstock serve worker": "",
    },
)

CONTRIBUTING = Page(
    "CONTRIBUTING.md",
    NotRun("make setup", "the tests run in what it makes"),
    Run("pytest tests/unit"),
    Shows("119 passed", exactly=_COUNTS),
    Run("penstock train"),
    Shows("step 1/25"),
    NotRun("return np.asarray", "the line as the reader changes it, which the next command does"),
    Given(
        "sed -i 's|return np.asarray((rewards - mean) / divisor)|return np.asarray((mean - rewards) / divisor)|'"
        " services/trainer/algorithm/advantage.py"
    ),
    Given("! pytest tests/unit/algorithm/test_advantage.py"),
    Shows("17 failed", exactly=_COUNTS),
    Run("penstock train"),
    Shows("step 1/25", exactly=r"\([-+]"),
    Given("python -m tests.docs.curves runs/before runs/after"),
    Run("penstock view"),
    NotRun("make fmt", "what CI does, in an hour"),
    NotRun("make docs", "CI builds the site; the others ask other sites, and run these pages"),
    stays={"penstock view": "http://"},
)

FIRST_HOUR = Page(
    "docs/first-hour.md",
    NotRun("make setup", "the tests run in what it makes"),
    NotRun("pip install", INSTALLS),
    NotRun("make wheel", INSTALLS),
    Run("penstock doctor"),
    NotRun("ok      GPUs", "an example with a fault"),
    Run("penstock train tiny-cpu --dry-run"),
    Run("penstock init"),
    instead={
        "penstock train tiny-cpu": "penstock train tiny-cpu --trainer.num_steps=3",
        "penstock train mine.toml": "penstock train mine.toml --trainer.num_steps=3",
    },
)

FIRST_RUN = Page(
    "docs/tutorials/first-run.md",
    Run("penstock doctor"),
    Shows("starting nats"),
    Given("penstock status runs/first"),
    Shows("first: not running", but=("  idle",)),
    Given("penstock view runs/first"),
    Run("penstock train --resume"),
    Shows("step 21/24"),
    stays={"penstock view": "http://"},
)

YOUR_DATA = Page(
    "docs/tutorials/your-data.md",
    Save('"""Draws', "make_rows.py"),
    Run("python make_rows.py"),
    Given("head -1 my-data/train.jsonl"),
    Shows('{"problem"'),
    Save("[data]", "my-data.toml"),
    Run("penstock data"),
    Shows("data.path"),
    Given('cp my-data/train.jsonl whole.jsonl; sed -i \'3s/"answer": "[0-9]*"/"answer": ""/\' my-data/train.jsonl'),
    Given("! penstock data tiny-cpu my-data.toml"),
    Shows("wrong "),
    Given("cp whole.jsonl my-data/train.jsonl"),
    Run("penstock train"),
    Shows("step 1/8", but=("ALARM",)),
)

YOUR_REWARD = Page(
    "docs/tutorials/your-reward.md",
    Save('"""A reward', "shown.py"),
    Given("diff shown.py examples/reward/near.py"),
    Save('{"id": "right"', "answers.jsonl"),
    Run("penstock score"),
    Shows('{"id": "right"'),
    Run("penstock train"),
    Shows("step 1/8"),
)

YOUR_ENVIRONMENT = Page(
    "docs/tutorials/your-environment.md",
    Save('"""An environment', "shown.py"),
    Given("diff shown.py examples/environment/second_chance.py"),
    Given(r"printf 'It is \\boxed{5}\n.\nIt is \\boxed{12}\n.\n' > turns.txt"),
    Run("PYTHONPATH"),
    Shows("--- user", but=("It is ", ".")),
    Run("PYTHONPATH"),
    Shows("step 1/8"),
    Given("grep -c environment/second_chance/first_attempt runs/*/metrics.jsonl"),
    instead={"--gold 12": "--gold 12 < turns.txt"},
)

YOUR_AGENT = Page(
    "docs/tutorials/your-agent.md",
    Save('"""An agent', "shown.py"),
    Given("diff shown.py examples/agent/retry_agent.py"),
    Run("PYTHONPATH"),
    Shows("step 1/8"),
    Given("PYTHONPATH=examples/agent penstock train tiny-cpu examples/agent/recipe.toml --run.folder=runs/going-on"),
    Run("curl"),
    stays={"PYTHONPATH=examples/agent penstock train tiny-cpu examples/agent/recipe.toml --run.folder": "step "},
)

TWO_NODES = Page(
    "docs/tutorials/two-nodes.md",
    NotRun("penstock serve nats", _ON_TWO_NODES),
    NotRun("penstock serve rollout", _ON_TWO_NODES),
    NotRun("rollout-0 is up", _PRINTED),
    NotRun("penstock replicas", _ON_TWO_NODES),
    NotRun("replica ", _PRINTED),
    NotRun("penstock serve worker", _ON_TWO_NODES),
    NotRun("step 14/30", _PRINTED),
    NotRun("ip netns add", _ON_TWO_NODES),
)

PAGES = (README, CONTRIBUTING, FIRST_HOUR, FIRST_RUN, YOUR_DATA, YOUR_REWARD, YOUR_ENVIRONMENT, YOUR_AGENT, TWO_NODES)
