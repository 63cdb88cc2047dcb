"""docs/rollouts."""

from tests.docs.pages.reasons import ADAPTERS, HOSTS, INSTALLS, LAYOUT
from tests.docs.steps import Given, NotRun, Page, Run, Save, Shows

_OPENAI = "tests/integration/openai_frontend/test_openai_page.py runs the page's examples"
_OF_OTHERS = "tests/unit/environments/test_examples_of_the_guide.py plays it"
_TURNS = (
    r"""{"id": "a", "gold": "12", "max_turns": 3, "responses": ["<tool_call>{\"name\": \"calc_score\", """
    r"""\"arguments\": {\"answer\": \"5\"}}</tool_call>", "It is \\boxed{12}."]}"""
)

PAGES = (
    Page(
        "docs/rollouts/agents.md",
        Save('"""An agent', "shown.py"),
        Given("diff shown.py examples/agent/guesser.py"),
        Save("[data]", "guesser.toml"),
        Given("PYTHONPATH=examples/agent penstock train tiny-cpu guesser.toml --dry-run"),
        Run("PYTHONPATH"),
        NotRun('{"base_url"', LAYOUT),
        NotRun("from openai import", "part of a runner; examples/agent/retry_agent.py does the same"),
        instead={"--trainer.num_steps=20": "--trainer.num_steps=3"},
    ),
    Page(
        "docs/rollouts/disaggregation.md",
        NotRun("prefill : decode", "a formula"),
        NotRun("2 * layers", "a formula"),
        Given("penstock init tiny-cpu recipe.toml"),
        Run("pip install", left_out={"pip": INSTALLS}),
        NotRun("penstock serve rollout", HOSTS),
        instead={"--rollout.decode=2": "--rollout.decode=2 --trainer.num_steps=3"},
    ),
    Page(
        "docs/rollouts/environments.md",
        Save('"""An environment', "shown.py"),
        Given("diff shown.py examples/environment/second_chance.py"),
        Save("from penstock.environments", "retry.py"),
        Given("mkdir my_package; sed s/Retry/Maze/ retry.py > my_package/maze.py"),
        Given("penstock init tiny-cpu recipe.toml"),
        Given("printf '[worker.environments]\\nretry = \"retry:Retry\"\\n' >> recipe.toml"),
        Run("penstock serve environments"),
        Run("from typing import Literal"),
        NotRun("# env_guess.py", _OF_OTHERS),
        NotRun("# env_guess.py", ADAPTERS),
        NotRun("# env_count.py", _OF_OTHERS),
        NotRun("# pip install reasoning-gym", ADAPTERS),
        NotRun("python -m venv theirs", ADAPTERS),
        NotRun("data.environment", LAYOUT),
        Given("printf 'It is 12\\n.\\n' > turn.txt"),
        Given("python -c \"from PIL import Image; Image.new('RGB', (96, 96)).save('triangle.png')\""),
        Run("penstock env --list"),
        Given(f"cat > turns.jsonl <<'LINES'\n{_TURNS}\nLINES"),
        Run("penstock env geo3k_tools -"),
        Shows('{"id": "a"', but=('{"id": "a", "gold"',)),
        instead={
            "7010 --network.host=0.0.0.0": "7011",
            "--pictures seen/": "--pictures seen/ < turn.txt",
            "--gold 12": "--gold 12 < turn.txt",
        },
        stays={"penstock serve environments": "environments.served"},
    ),
    Page(
        "docs/rollouts/openai.md",
        NotRun("pip install", f"{INSTALLS}; {_OPENAI}"),
        NotRun("curl", _OPENAI),
        NotRun("from openai", _OPENAI),
        NotRun("import base64", _OPENAI),
        NotRun("from openai", _OPENAI),
        NotRun("curl", _OPENAI),
    ),
)
