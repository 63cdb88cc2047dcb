"""The READMEs of examples/."""

from tests.docs.pages.reasons import HOSTS, INSTALLS
from tests.docs.steps import NotRun, Page, Run

_SHORT = {"--trainer.num_steps=20": "--trainer.num_steps=3"}

PAGES = (
    *(
        Page(f"examples/{name}/README.md", Run("PYTHONPATH"), instead=_SHORT)
        for name in ("agent", "algorithm", "environment")
    ),
    Page("examples/reward/README.md", Run("penstock train"), instead=_SHORT),
    Page(
        "examples/other_trainers/README.md",
        NotRun("pip install", f"{INSTALLS}; {HOSTS}: tests/integration/reward/test_examples.py calls such a service"),
    ),
)
