"""How tokens are coloured: the views that a sequence has, their scales and what the legend says."""

import json
from typing import Any

import pytest

from tests.support.view_scripts import ViewScripts

_NAMES = ("dlogp", "ratio", "lag", "advantages", "engine", "entropy")


def _token(**numbers: float | None) -> dict[str, Any]:
    """A token with these numbers; it has no others."""
    return {**dict.fromkeys(_NAMES), **numbers}


def _views(scripts: ViewScripts, tokens: list[dict[str, Any]], asked: str) -> tuple[list[str], str | None, float]:
    """The names of the views of tokens, of the one that is shown, and its largest number."""
    known, shown, most = scripts.run(
        f"""
        const {{ known, view, most }} = load("tokens.js").viewOf({json.dumps(tokens)}, {json.dumps(asked)});
        return [known.map(([name]) => name), view?.[0] ?? null, most];
        """
    )
    return known, shown, most


def _colours(scripts: ViewScripts, tokens: list[dict[str, Any]], asked: str) -> list[str]:
    """What the tokens are coloured with."""
    found: list[str] = scripts.run(
        f"""
        const tokens = {json.dumps(tokens)};
        const {{ view: [, , value, colour], most }} = load("tokens.js").viewOf(tokens, {json.dumps(asked)});
        return tokens.map((token) => (value(token) === null ? null : colour(value(token), most)));
        """
    )
    return found


_BLUE, _ORANGE = "rgb(0 114 178 / {:.3f})", "rgb(213 94 0 / {:.3f})"


def test_only_views_that_have_numbers_are_offered(scripts: ViewScripts) -> None:
    """Without a trainer's numbers, as of evaluated answers, the engine's are shown; without any, none."""
    trained = [_token(), _token(dlogp=0.25, ratio=1.0, engine=-1.0), _token(dlogp=-0.5, ratio=1.0, engine=-2.0)]
    assert _views(scripts, trained, "dlogp") == (["dlogp", "ratio", "engine"], "dlogp", 0.5)
    assert _views(scripts, trained, "ratio") == (["dlogp", "ratio", "engine"], "ratio", 1.0)
    assert _views(scripts, trained, "entropy")[1] == "engine"
    assert _views(scripts, [_token(engine=-2.0, lag=1), _token()], "dlogp") == (["lag", "engine"], "engine", 2.0)
    assert _views(scripts, [_token(lag=3), _token(lag=1)], "dlogp") == (["lag"], "lag", 3)
    assert _views(scripts, [_token()], "dlogp") == ([], None, 0)


@pytest.mark.parametrize(
    ("view", "values", "colours"),
    [
        ("dlogp", [-0.5, 0.25, 0.0], [_BLUE.format(0.75), _ORANGE.format(0.375), _ORANGE.format(0)]),
        ("dlogp", [0.0, 0.0], [_ORANGE.format(0)] * 2),
        ("ratio", [0.5, 2**0.5, 1.0], [_BLUE.format(0.75), _ORANGE.format(0.375), _ORANGE.format(0)]),
        ("ratio", [8.0, 0.1], [_ORANGE.format(0.75), _BLUE.format(0.75)]),
        ("lag", [0, 1, 4], [_ORANGE.format(0), _ORANGE.format(0.1875), _ORANGE.format(0.75)]),
        ("lag", [0, 0], [_ORANGE.format(0)] * 2),
        ("advantages", [-2.0, 1.0], [_BLUE.format(0.75), _ORANGE.format(0.375)]),
        ("advantages", [0.0], [_ORANGE.format(0)]),
        ("engine", [-2.5, -9.0], [_ORANGE.format(0.375), _ORANGE.format(0.75)]),
        ("entropy", [0.6, 3.0], [_ORANGE.format(0.15), _ORANGE.format(0.75)]),
    ],
)  # fmt: skip
def test_a_view_is_blue_for_less_and_orange_for_more(
    scripts: ViewScripts, view: str, values: list[float], colours: list[str]
) -> None:
    """The stronger the more; a token without the number has no colour, nor has one where all are 0."""
    tokens = [*(_token(**{view: value}) for value in values), _token()]
    assert _colours(scripts, tokens, view) == [*colours, None]


@pytest.mark.parametrize(
    ("view", "most", "ends"),
    [
        ("dlogp", 3e-5, ("-3.0e-5", "3.0e-5")),
        ("dlogp", 0, ("0", "0")),
        ("ratio", 1.5, ("½", "2")),
        ("lag", 3, ("0", "3")),
        ("lag", 0, ("0", "1")),
        ("advantages", 1.25, ("-1.3", "1.3")),
        ("advantages", 0, ("0", "0")),
        ("engine", 7.5, ("0", "5 nats")),
        ("entropy", 0.1, ("0", "3 nats")),
    ],
)
def test_a_legend_says_what_its_colours_mean(
    scripts: ViewScripts, view: str, most: float, ends: tuple[str, str]
) -> None:
    """The values that have the colours at its ends, also where no token has one, as when nothing is old."""
    scale = scripts.call("tokens.js", "scaleOf", [view], most)
    assert (scale["low"], scale["high"]) == ends
    if most:
        sizes = {"ratio": 0.5, "lag": 0.0, "engine": -0.0, "entropy": 0.0}
        tops = {"ratio": 2.0, "engine": -5.0, "entropy": 3.0}
        low, high = sizes.get(view, -most), tops.get(view, most)
        tokens = [_token(**{view: value}) for value in (low, high)]
        assert _colours(scripts, tokens, view) == [scale["colours"][0], scale["colours"][-1]]
    middle = scale["colours"][2]
    assert middle == _ORANGE.format(0.375 if view in ("lag", "engine", "entropy") else 0)
