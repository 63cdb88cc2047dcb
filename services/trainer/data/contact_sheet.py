"""Renders a page of examples for people to look at: pictures, messages and gold answers, as policy and verifier get
them, and a policy's answers.
"""

import base64
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.model.images import decode_image
from penstock.records import Message, TextPart
from services.trainer.data.rows.example import Example

_MAX_SIDE_PX = 480
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2024; }
h1 { font-size: 1.3rem; } article { border-top: 1px solid #d5d9de; padding: 1rem 0; }
h2 { font-size: .85rem; font-weight: 600; color: #5b6570; margin: 0 0 .5rem; }
.role { font-size: .75rem; color: #5b6570; text-transform: uppercase; letter-spacing: .05em; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
img { display: block; max-width: 100%; border: 1px solid #d5d9de; margin: .3rem 0; background: #fff; }
figure { margin: 0; } figcaption { font-size: .75rem; color: #5b6570; }
.answer { border-left: 3px solid #c8cdd3; margin: .6rem 0; padding-left: .8rem; } .right { border-color: #4c9a5a; }
.gold { font-family: ui-monospace, monospace; background: #eef6ee; padding: .1rem .4rem; }
details { font-size: .8rem; color: #5b6570; margin-top: .5rem; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A policy's answer."""

    text: str
    facts: str
    """Its score and other facts, in one line."""
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An example, and its origin."""

    origin: str
    """Source and row."""
    example: Example
    num_tokens: int | None
    """Tokens of its prompt, images expanded; None if not measured."""
    answers: Sequence[Answer] = ()
    """A policy's answers."""


def render_sheet(title: str, entries: Sequence[Entry]) -> str:
    """Return an HTML page that needs no other file and runs no script; pictures are shrunk to 480 pixels."""
    body = "\n".join(map(_article, entries))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _article(entry: Entry) -> str:
    example = entry.example
    facts = [entry.origin, f"profile {example.profile}", f"environment {example.environment}"]
    if entry.num_tokens is not None:
        facts.append(f"{entry.num_tokens} tokens")
    messages = "".join(_message(message, example) for message in example.messages)
    golds = " or ".join(f'<span class="gold">{html.escape(gold)}</span>' for gold in example.golds)
    extra = f"<details><summary>extra</summary>{html.escape(str(dict(example.extra)))}</details>"
    return (
        f"<article><h2>{html.escape(' · '.join(facts))}</h2>\n{messages}\n"
        f"{f'<p>Answer: {golds}</p>' if golds else ''}{extra if example.extra else ''}"
        f"{''.join(map(_answer, entry.answers))}</article>"
    )


def _answer(answer: Answer) -> str:
    return (
        f'<div class="answer{" right" if answer.is_right else ""}"><div class="role">{html.escape(answer.facts)}</div>'
        f'<p class="text">{html.escape(answer.text)}</p></div>'
    )


def _message(message: Message, example: Example) -> str:
    parts = [
        f'<p class="text">{html.escape(part.text)}</p>'
        if isinstance(part, TextPart)
        else _figure(example.images[part.index], part.index)
        for part in message.parts
    ]
    calls = [
        f'<p class="text">{html.escape(call.name)}({html.escape(json.dumps(call.arguments, ensure_ascii=False))})</p>'
        for call in message.tool_calls
    ]
    return f'<div class="role">{message.role}</div>{"".join(parts + calls)}'


def _figure(data: bytes, number: int) -> str:
    image = decode_image(data, field=f"image {number}")
    width, height = image.size
    image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX))
    out = io.BytesIO()
    image.save(out, "PNG")
    encoded = base64.b64encode(out.getvalue()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{encoded}" alt="image {number}">'
        f"<figcaption>image {number}, {width} × {height} pixels</figcaption></figure>"
    )
