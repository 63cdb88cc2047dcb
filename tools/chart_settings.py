"""The JSON schema of a list `settings` in the values of the Helm chart. It names every setting, as `section.key=value`.

Each section has a pattern of its own, because Helm shows the pattern that an item does not match.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from penstock.config.reference import Section

_CHOSEN: Final = "<name>"
"""In a section's key, the part that a person chooses."""
_PART: Final = "[^.=]+"


def settings_schema(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the schema for the settings of these sections."""
    plain: dict[str, dict[str, None]] = defaultdict(dict)
    tables: dict[str, dict[str, None]] = defaultdict(dict)
    for section in sections:
        parts = section.key.split(".")
        for depth, part in enumerate(parts):
            tables[".".join(parts[:depth])][part] = None
        for setting in section.settings:
            (tables if setting.kind.startswith("table of") else plain)[section.key][setting.name] = None
    roots = tables.pop("")
    return {
        "type": "array",
        "items": {
            "type": "string",
            "pattern": rf"^({'|'.join(roots)})(\.{_PART})+=",
            "allOf": [
                _names_of(key, [*plain[key]], [*tables[key]])
                for key in dict.fromkeys([*tables, *plain])
                if _CHOSEN not in tables[key]
            ],
            "description": "section.key=value, as on the command line without its dashes.",
        },
    }


def _names_of(key: str, plain: Sequence[str], tables: Sequence[str]) -> dict[str, Any]:
    """Return the schema of what stands in the section `key`: plain settings, and tables, which may have keys."""
    section = r"\.".join(_PART if part == _CHOSEN else part for part in key.split("."))
    names = [f"({'|'.join(each)}){end}" for each, end in ((plain, "="), (tables, "[.=]")) if each]
    return {"if": {"pattern": rf"^{section}\."}, "then": {"pattern": rf"^{section}\.({'|'.join(names)})"}}
