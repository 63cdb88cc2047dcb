"""The scripts of the pages of `penstock view` in a JavaScript engine, without a browser."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quickjs

_STATIC = Path(__file__).parents[2] / "services" / "view" / "static"
_IMPORT = re.compile(r'^import (\{.*?\}|\w+) from "(\.{1,2}/[^"]+)";$', re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


class ViewScripts:
    """Calls what the scripts export. They are loaded when they are first imported, as a browser does."""

    def __init__(self, exported: Any = None, *, answer: Callable[[str], str] | None = None) -> None:
        """Load nothing yet.

        Args:
            exported: The data in an exported page.
            answer: Returns the JSON that the server answers to a path with its query.
        """
        element = "null" if exported is None else f"{{ textContent: {json.dumps(json.dumps(exported))} }}"
        self._context = quickjs.Context()
        self._context.add_callable("atob", lambda text: base64.b64decode(text).decode("latin-1"))
        self._context.add_callable("sourceOf", _as_function_body)
        if answer is not None:
            self._context.add_callable("answer", answer)
        self._context.eval(
            f"""
            const document = {{ getElementById: () => ({element}) }};
            class URLSearchParams {{
              constructor(entries) {{ this.entries = entries; this.size = entries.length; }}
              toString() {{ return this.entries.map((entry) => entry.map(encodeURIComponent).join("=")).join("&"); }}
            }}
            async function fetch(path) {{
              const body = answer(path);
              return {{ status: 200, ok: true, json: async () => JSON.parse(body) }};
            }}
            const loaded = {{}};
            function load(name) {{
              if (name.startsWith("vendor/")) return {{}}; // draws
              if (!(name in loaded)) {{
                loaded[name] = {{}};
                new Function("exports", sourceOf(name))(loaded[name]);
              }}
              return loaded[name];
            }}
            """
        )

    def call(self, script: str, function: str, *arguments: Any, undefined: str | None = None) -> Any:
        """Return what the exported function `function` of `script` returns; both ways as JSON.

        `undefined` is what stands for undefined both ways, which JSON turns into null or leaves out.
        """
        given, shown = json.dumps(arguments), ""
        if undefined is not None:
            mark = json.dumps(undefined)
            given = f"JSON.parse({json.dumps(given)}, (_, it) => it === {mark} ? undefined : it)"
            shown = f", (_, it) => it === undefined ? {mark} : it"
        found = self._context.eval(f"JSON.stringify(load({json.dumps(script)}).{function}(...{given}){shown})")
        return None if found is None else json.loads(found)

    def run(self, code: str) -> Any:
        """Return what `code` returns, the body of an asynchronous function that may call `load(script)`, as JSON."""
        self._context.eval(
            f"""
            globalThis.ended = ["it did not end", null];
            (async () => {{ {code} }})().then(
              (value) => {{ ended = [null, value]; }}, (error) => {{ ended = [String(error), null]; }});
            """
        )
        while self._context.execute_pending_job():
            pass
        error, value = json.loads(self._context.eval("JSON.stringify(ended)"))
        assert error is None, error
        return value


def _as_function_body(name: str) -> str:
    """Return the module as the body of a function of `exports`: the engine's binding loads no modules by name."""
    path = _STATIC / name

    def imported(found: re.Match[str]) -> str:
        names = found[1].replace(" as ", ": ") if found[1].startswith("{") else f"{{ default: {found[1]} }}"
        target = (path.parent / found[2]).resolve().relative_to(_STATIC.resolve())
        return f'const {names} = load("{target.as_posix()}");'

    source = path.read_text()
    names = [match[2] for match in _EXPORT.finditer(source)]
    source = _EXPORT.sub(r"\1 \2", _IMPORT.sub(imported, source))
    source = re.sub(r"^export default ", "exports.default = ", source, flags=re.MULTILINE)
    return source + "".join(f"\nexports.{each} = {each};" for each in names)
