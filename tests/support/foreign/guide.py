"""The examples of docs/rollouts/environments.md for other libraries' environments."""

import re
import tomllib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "rollouts" / "environments.md"


def write_example(heading: str, folder: Path) -> dict[str, Any]:
    """Write the file of the section `heading` into `folder`; return what the section's recipe says."""
    [section] = re.findall(rf"^### {heading}\n(.*?)^##", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    [code] = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    [recipe] = re.findall(r"^```toml\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    name = code.partition("\n")[0].removeprefix("# ")
    (folder / (name if name.endswith(".py") else "script.py")).write_text(code)
    return tomllib.loads(recipe)
