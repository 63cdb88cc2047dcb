"""Colours can be told apart with any kind of colour vision, and texts be read, on light and on dark paper."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.view_scripts import ViewScripts

_STYLE = Path(__file__).parents[4] / "services" / "view" / "static" / "style.css"
_VISIONS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""What is seen of linear RGB, by Machado, Oliveira and Fernandes 2009 at severity 1."""
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
"""XYZ under D65 of linear sRGB."""
_LEAST_DIFFERENCE = 18
"""In CIELAB, 1976. Two of about 2 can just be told apart side by side; bars and lines are thin and apart."""
_LEAST_DIFFERENCE_TO_FAINT = 12
"""Of a group's bar to one of no group, which is rare and says so when it is pointed at."""
_LEAST_DIFFERENCE_OF_STRENGTHS = 10
"""Of two tokens, or two cells of the heat map, of one hue: they are broad and beside each other."""
_LEAST_DIFFERENCE_TO_PAPER = 3
"""Of a cell that has few tokens."""
_LEAST_CONTRAST = 3
"""WCAG 2.1, 1.4.11: what is needed to understand graphics."""
_LEAST_CONTRAST_OF_TEXT = 4.5
"""WCAG 2.1, 1.4.3."""
_THEMES = ("light", "dark")


def _values(colour: str) -> np.ndarray:
    """Red, green and blue from 0 to 1 of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    return np.array([int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)])


def _over(colour: str, paper: str, opacity: float = 1.0) -> str:
    """The colour that is seen of a translucent one, rgb(r g b / a) or with this opacity, on a paper."""
    values = _values(colour) if colour[0] == "#" else None
    if values is None:
        red, green, blue, opacity = map(float, re.findall(r"[0-9.]+", colour))
        values = np.array([red, green, blue]) / 255
    mixed = np.round(255 * (opacity * values + (1 - opacity) * _values(paper))).astype(int)
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _linear(colour: str) -> np.ndarray:
    """Linear RGB from 0 to 1 of #rgb or #rrggbb."""
    values = _values(colour)
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    x, y, z = _XYZ @ linear / _XYZ.sum(axis=1)
    x, y, z = (np.cbrt(each) if each > 216 / 24389 else (24389 / 27 * each + 16) / 116 for each in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _difference(one: str, other: str, vision: str) -> float:
    """The colour difference that somebody with this vision sees."""
    seen = [_lab(np.clip(_VISIONS[vision] @ _linear(colour), 0, 1)) for colour in (one, other)]
    return float(np.linalg.norm(seen[0] - seen[1]))


def _contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.1."""
    low, high = sorted(float(_XYZ[1] @ _linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def series(scripts: ViewScripts) -> list[str]:
    """Colours of lines in a chart, and of groups in the timeline, which are all but the last."""
    found: list[str] = scripts.run("return load('colours.js').SERIES")
    return found


@pytest.fixture(scope="module")
def parts(scripts: ViewScripts) -> dict[str, str]:
    """Colours in the trainer's lane and of pushes, which have one legend."""
    found: dict[str, str] = scripts.run("return load('colours.js').PARTS")
    return found


def _of_themes(name: str) -> list[str]:
    """A colour of the light theme and of the dark one."""
    found = re.findall(rf"--{name}: (#[0-9a-f]+);", _STYLE.read_text())
    assert len(found) == 2
    return found


def test_the_measures_are_those_that_are_published() -> None:
    """Differences and contrasts of known colours; grey is seen alike with every vision."""
    assert _lab(_linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    assert _contrast("#fff", "#000") == pytest.approx(21)
    assert _contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.01)
    for vision in _VISIONS:
        assert _difference("#808080", "#000", vision) == pytest.approx(53.59, abs=0.05)
    assert _difference("#cc79a7", "#999999", "deuteranopia") == pytest.approx(7.05, abs=0.05)


@pytest.mark.parametrize("vision", _VISIONS)
def test_colours_that_are_seen_together_differ(series: list[str], parts: dict[str, str], vision: str) -> None:
    """Any two lines of a chart, any two groups of the timeline and any two parts of the trainer's time."""
    assert len({*parts.values()}) == len(parts)
    for together in (series, [*parts.values()]):
        differences = {pair: _difference(*pair, vision) for pair in itertools.combinations(together, 2)}
        assert min(differences.values()) >= _LEAST_DIFFERENCE, min(differences, key=differences.__getitem__)


@pytest.mark.parametrize("vision", _VISIONS)
def test_a_bar_of_a_group_differs_from_one_of_none(series: list[str], vision: str) -> None:
    """Calls that are nobody's, and pauses, are in the faint colour of the text."""
    for faint in _of_themes("faint"):
        assert min(_difference(colour, faint, vision) for colour in series[:-1]) >= _LEAST_DIFFERENCE_TO_FAINT


def test_colours_stand_out_from_the_paper(series: list[str], parts: dict[str, str]) -> None:
    """By themselves: a bar is a few pixels high, which leaves no room for an outline."""
    for paper in _of_themes("paper"):
        contrasts = {colour: _contrast(colour, paper) for colour in {*series, *parts.values()}}
        assert min(contrasts.values()) >= _LEAST_CONTRAST, contrasts


def _theme(name: str) -> dict[str, str]:
    """The colours of a theme by their names."""
    light, dark = re.findall(r"\{\s*color-scheme: (?:light|dark);(.*?)\}", _STYLE.read_text(), re.DOTALL)
    return dict(re.findall(r"--(\w+): (#[0-9a-f]+);", light if name == "light" else dark))


def _texts() -> set[tuple[str, str]]:
    """Names of the colours of texts and of what they stand on, as the rules of the style say it.

    A rule without a background is for text on any paper; one without a colour for text in ink.
    """
    found = set()
    for selector, rule in re.findall(r"([^{}]+)\{([^{}]*)\}", _STYLE.read_text()):
        colour = re.search(r"(?<![-\w])color: var\(--(\w+)\)", rule)
        background = re.search(r"background: var\(--(\w+)\)", rule)
        is_shape = re.search(r"\.(rewards|bar) i", selector)
        if (colour or background) and not is_shape:
            papers = [background[1]] if background else ["paper", "sheet"]
            found |= {(colour[1] if colour else "ink", paper) for paper in papers}
    return found


def _tokens(scripts: ViewScripts, *values: float) -> list[str]:
    """The colours of tokens with these strengths, from -1 to 1."""
    found: list[str] = scripts.run(f"return {[*values]}.map(load('colours.js').diverging)")
    return found


@pytest.mark.parametrize("theme", _THEMES)
def test_texts_are_read(theme: str) -> None:
    """Headings, facts, links, badges, errors, buttons that are pressed and the note of an exported page."""
    colours, texts = _theme(theme), _texts()
    assert {("good", "paper"), ("bad", "sheet"), ("paper", "bad"), ("paper", "link"), ("ink", "mark")} <= texts
    contrasts = {pair: _contrast(*(colours[each] for each in pair)) for pair in texts}
    assert min(contrasts.values()) >= _LEAST_CONTRAST_OF_TEXT, min(contrasts, key=contrasts.__getitem__)


@pytest.mark.parametrize("theme", _THEMES)
def test_coloured_and_pale_tokens_are_read(scripts: ViewScripts, theme: str) -> None:
    """On the strongest colours of the scales, and with the opacity of what is not the policy's own."""
    paper, ink = _theme(theme)["paper"], _theme(theme)["ink"]
    for colour in _tokens(scripts, -1, -0.5, 0, 0.5, 1):
        assert _contrast(ink, _over(colour, paper)) >= _LEAST_CONTRAST_OF_TEXT, colour
    (opacity,) = re.findall(r"\.tokens span\.foreign \{ opacity: ([0-9.]+);", _STYLE.read_text())
    pale = _over(ink, paper, float(opacity))
    assert _contrast(pale, paper) >= _LEAST_CONTRAST_OF_TEXT
    assert _difference(pale, ink, "usual") >= _LEAST_DIFFERENCE


@pytest.mark.parametrize("theme", _THEMES)
@pytest.mark.parametrize("vision", _VISIONS)
def test_less_and_more_are_told_apart_on_tokens(scripts: ViewScripts, vision: str, theme: str) -> None:
    """Already at half of the scale, where each also differs from a token without colour and from one at the end."""
    paper = _theme(theme)["paper"]
    least, less, more, most = (_over(colour, paper) for colour in _tokens(scripts, -1, -0.5, 0.5, 1))
    differences = {pair: _difference(*pair, vision) for pair in itertools.combinations((less, paper, more), 2)}
    assert min(differences.values()) >= _LEAST_DIFFERENCE, differences
    for strong, weak in ((least, less), (most, more)):
        assert _difference(strong, weak, vision) >= _LEAST_DIFFERENCE_OF_STRENGTHS


@pytest.mark.parametrize("theme", _THEMES)
@pytest.mark.parametrize("vision", _VISIONS)
def test_shares_of_the_heat_map_are_told_apart(scripts: ViewScripts, vision: str, theme: str) -> None:
    """A rare age from none, a common one from a rare one; the more, the farther from the paper."""
    paper = _theme(theme)["paper"]
    shares = (0.01, 0.1, 0.4, 1.0)
    found: list[str] = scripts.run(
        f"return {[*shares]}.map((share) => load('colours.js').sequential(Math.sqrt(share)))"
    )
    cells = [_over(colour, paper) for colour in found]
    from_paper = [_difference(paper, cell, vision) for cell in cells]
    assert from_paper == sorted(from_paper)
    assert from_paper[0] >= _LEAST_DIFFERENCE_TO_PAPER
    assert (
        min(_difference(one, other, vision) for one, other in itertools.pairwise(cells))
        >= _LEAST_DIFFERENCE_OF_STRENGTHS
    )


@pytest.mark.parametrize("theme", _THEMES)
@pytest.mark.parametrize("vision", _VISIONS)
def test_good_differs_from_bad(vision: str, theme: str) -> None:
    """Badges of outcomes are listed below each other."""
    colours = _theme(theme)
    pairs = itertools.combinations((colours["good"], colours["bad"], colours["faint"]), 2)
    differences = {pair: _difference(*pair, vision) for pair in pairs}
    assert min(differences.values()) >= _LEAST_DIFFERENCE_TO_FAINT, differences


@pytest.mark.parametrize("theme", _THEMES)
def test_shapes_stand_out_from_their_paper(theme: str) -> None:
    """The mark of the focus, bars of rewards and loads, and their outlines."""
    colours = _theme(theme)
    for name in ("focus", "good", "faint"):
        for paper in ("paper", "sheet"):
            assert _contrast(colours[name], colours[paper]) >= _LEAST_CONTRAST, (name, paper)
