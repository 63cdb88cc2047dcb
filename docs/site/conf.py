"""The documentation as a site: every page where it stands in the tree, so that links work here and on a code host.

`make docs` builds it. A page that no toctree has, a link to a file or heading that does not exist, and a code block in
an unknown language are warnings, and warnings are errors.
"""

import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.matching import patfilter

_CONTENTS = {
    "Begin": (
        "docs/first-hour",
        "docs/tutorials/README",
        *(f"docs/tutorials/{name}" for name in ("first-run", "your-data", "your-reward", "your-environment")),
        *(f"docs/tutorials/{name}" for name in ("your-agent", "two-nodes", "*")),
        "docs/coming-from/*",
    ),
    "Train": ("docs/training/data", "docs/training/recipes", "docs/training/algorithms", "docs/training/*"),
    "Rollouts": ("docs/rollouts/environments", "docs/rollouts/agents", "docs/rollouts/*"),
    "Reward": ("docs/reward/service", "docs/reward/*"),
    "Operation": ("docs/operation/deploy", "docs/operation/*", "deploy/**"),
    "Look up": ("docs/architecture", "docs/glossary", "docs/settings", "docs/metrics", "docs/*", "CHANGELOG"),
    "Contribute": ("CONTRIBUTING", "examples/README", "examples/**", "docs/adr/README", "docs/adr/*", "**"),
}
"""The navigation: captions, and their pages in order. A `*` stands for all pages that no earlier pattern matches."""

project = "Penstock"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["*.md", *(f"{room}/**.md" for room in ("bench", "deploy", "docs", "examples", "tests"))]
exclude_patterns = [".*", "build", "dist", "runs", "bench/results/page.md"]

myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
mermaid_fullscreen = False
mermaid_height = "auto"
mermaid_init_config = {"startOnLoad": False, "deterministicIds": True}  # else two diagrams of a millisecond share an id
highlight_language = "text"

html_theme = "furo"
html_title = "Penstock"
html_copy_source = False
html_show_copyright = False

linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]  # its pages make their anchors in the browser
linkcheck_timeout = 20
linkcheck_retries = 2


def _append_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give README.md the navigation, which it does not show on a code host."""
    if page == root_doc:
        pages = {root_doc}
        for caption, patterns in _CONTENTS.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
            for pattern in patterns:
                found = sorted(set(patfilter(app.project.docnames, pattern)) - pages)
                source[0] += "".join(f"/{each}\n" for each in found)
                pages.update(found)
            source[0] += "```\n"


def _write_front_page(app: Sphinx, error: Exception | None) -> None:
    """Serve README.md at the site's address, too."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _append_contents)
    app.connect("build-finished", _write_front_page)
