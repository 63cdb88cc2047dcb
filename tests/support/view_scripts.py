"""The scripts of the pages of `penstock view` in a JavaScript engine, without a browser."""

import base64
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import quickjs

_STATIC = Path(__file__).parents[2] / "services" / "view" / "static"
_IMPORT = re.compile(r'^import (\{.*?\}|\w+) from "(\.{1,2}/[^"]+)";$', re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)

DOCUMENT = """
    class Element {
        childNodes = [];
        listeners = {};
        dataset = {};
        style = { setProperty() {}, removeProperty() {} };
        constructor(tag) { this.tag = tag; }
        setAttribute(name, value) { this[name] = value; }
        removeAttribute(name) { delete this[name]; }
        addEventListener(kind, act) { this.listeners[kind] = act; }
        append(...children) { this.childNodes.push(...children); }
        replaceChildren(...children) { this.childNodes = children; }
        querySelectorAll() { return []; }
        querySelector() { return null; }
        isEqualNode(other) { return other?.tag === this.tag && other.textContent === this.textContent; }
        focus() {}
        get firstChild() { return this.childNodes[0] ?? null; }
        get options() { return this.childNodes; }
        get textContent() {
            const texts = this.childNodes.map((child) => child.textContent ?? child);
            return this.tag === "img" ? `<${this.src}>` : texts.join("");
        }
        set textContent(text) { this.childNodes = [text]; }
    }
    document.createElement = (tag) => new Element(tag);
    globalThis.IntersectionObserver = class { observe() {} };
"""
"""A browser's document, as far as the scripts need one: elements are made, read as text and never laid out."""

WINDOW = f"""
    {DOCUMENT}
    const elements = {{ exported: null }};
    document.getElementById = (name) => (name in elements ? elements[name] : (elements[name] = new Element(name)));
    document.documentElement = new Element("html");
    document.querySelector = () => null;
    document.activeElement = {{ matches: () => false }};
    globalThis.location = {{
        part: "",
        numReloads: 0,
        get hash() {{ return this.part; }},
        set hash(part) {{ this.part = part.startsWith("#") ? part : `#${{part}}`; }},
        reload() {{ this.numReloads += 1; }},
    }};
    globalThis.matchMedia = () => ({{ matches: false }});
    globalThis.getSelection = () => ({{ isCollapsed: true }});
    globalThis.scrollTo = () => {{}};
    const heard = {{}};
    globalThis.addEventListener = (kind, act) => {{ heard[kind] = act; }};
    const timers = [];
    globalThis.setTimeout = (act) => {{ timers.push(act); }};
    const until = async (holds) => {{ while (!holds()) await null; }};
    // Opens the first page at an address behind #.
    const open = async (hash) => {{
        location.hash = hash;
        load("main.js");
        await until(() => timers.length);
    }};
    // Follows a link.
    const go = async (hash) => {{
        location.hash = hash;
        await heard.hashchange();
    }};
    // Lets the seconds pass until news are asked for.
    const pass = async () => {{ await timers.shift()(); }};
    const page = () => document.getElementById("page").textContent;
    const status = () => document.getElementById("status").textContent;
"""
"""A window for `main.js`, whose time passes when a test wants it."""


class ViewScripts:
    """Calls what the scripts export. They are loaded when they are first imported, as a browser does."""

    def __init__(self, exported: Any = None, *, answer: Callable[[str], str | tuple[int, str]] | None = None) -> None:
        """Load nothing yet.

        Args:
            exported: The data in an exported page.
            answer: Returns the JSON that the server answers to a path with its query, after its status if that is not
                200; a status of 0 stands for no answer.
        """
        element = "null" if exported is None else f"{{ textContent: {json.dumps(json.dumps(exported))} }}"
        self._context = quickjs.Context()
        self._context.add_callable("atob", lambda text: base64.b64decode(text).decode("latin-1"))
        self._context.add_callable("sourceOf", _as_function_body)
        if answer is not None:
            self._context.add_callable("statusAndBody", partial(_with_status, answer))
            self._context.eval("const answer = (path) => JSON.parse(statusAndBody(path));")
        self._context.eval(
            f"""
            const document = {{ getElementById: () => ({element}) }};
            class URLSearchParams extends Map {{
              constructor(given = "") {{
                const parts = typeof given === "string" ? given.split("&").filter(Boolean) : null;
                const pairs = parts?.map((pair) => pair.split("=").map(decodeURIComponent));
                super(pairs ?? (given[Symbol.iterator] ? given : Object.entries(given)));
              }}
              get(name) {{ return super.get(name) ?? null; }}
              set(name, value) {{ return super.set(name, String(value)); }}
              toString() {{ return [...this].map((entry) => entry.map(encodeURIComponent).join("=")).join("&"); }}
            }}
            async function fetch(path) {{
              const found = answer(path);
              const [status, body] = Array.isArray(found) ? found : [200, found];
              if (!status) throw new TypeError("Failed to fetch");
              return {{ status, ok: status === 200, json: async () => JSON.parse(body) }};
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

    def evaluate(self, code: str) -> None:
        """Run `code`; what it declares stays."""
        self._context.eval(code)

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


def _with_status(answer: Callable[[str], str | tuple[int, str]], path: str) -> str:
    found = answer(path)
    return json.dumps((200, found) if isinstance(found, str) else found)


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
