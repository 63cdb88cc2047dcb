"""The logic of the Group page, which is tested in a browser by `make test-browser` too."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from services.view.app import view_app
from services.view.run_reader import RunReader
from tests.support.view_runs import column, make_run
from tests.support.view_scripts import DOCUMENT, ViewScripts

_DRAW = f"""
    {DOCUMENT}
    const draw = async (asked) => {{
        const context = {{ run: 0, parameters: {{ get: (name) => asked[name] ?? null }}, link: () => "" }};
        const drawn = await load("pages/group.js").default.draw(context);
        return drawn.map((each) => each.textContent ?? String(each)).join("");
    }};
"""
"""`draw` returns the page's text."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A server that shows a run with a group of two samples."""
    return TestClient(view_app([RunReader(make_run(tmp_path_factory.mktemp("run"), num_steps=1))]))


def page_of(client: TestClient, change: Callable[[dict[str, Any]], None]) -> ViewScripts:
    """Scripts for which the server answers with a group after `change`."""

    def answer(path: str) -> str:
        group = client.get(path).json()
        change(group)
        return msgspec.json.encode(group).decode()

    return ViewScripts(answer=answer)


def sequence(word: str, *differences: float, is_trained: bool = True) -> dict[str, Any]:
    """Tokens of a text each, whose log-probabilities differ so between trainer and engine."""
    trained = {"logprobs": column([-1.0 + each for each in differences])} if is_trained else {}
    return {
        "token_ids": column([7] * len(differences), "<i4"),
        "texts": [f" {word}"] * len(differences),
        "own": column([1] * len(differences), "u1"),
        "versions": [[len(differences), 1]],
        "engine_logprobs": column([-1.0] * len(differences)),
        "images": [],
        **trained,
    }


def test_the_largest_difference_is_looked_for_in_every_sequence(scripts: ViewScripts) -> None:
    """An agent's sample, or one whose history was cut, has several. Without the trainer's numbers it is the first."""
    samples = [
        {"sequences": [sequence("a", 0.125)]},
        {"sequences": [sequence("b", 0.25), sequence("c", 0.125, -2.0), sequence("d", 1.0)]},
        {"sequences": [sequence("e", 9.0, is_trained=False)]},
    ]
    places = [scripts.call("pages/group.js", "mostDiverged", some) for some in (samples, samples[:1], samples[2:])]
    assert places == [{"sample": 1, "sequence": 1}, *[{"sample": 0, "sequence": 0}] * 2]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, "Sample 1, token by token sixth"),
        ({"sequence": "0"}, "Sample 1, token by token fourth"),
        ({"sample": "0"}, "Sample 0, token by token first"),
        ({"sample": "0", "sequence": "1"}, "Sample 0, token by token second"),
        ({"sample": "0", "sequence": "9"}, "Sample 0, token by token third"),
        ({"sample": "9"}, "Sample 1, token by token fourth"),
    ],
    ids=str,
)
def test_the_sequence_that_is_asked_for_is_shown(client: TestClient, asked: dict[str, str], shown: str) -> None:
    """Else the one with the largest difference, or of a sample that is asked for the first."""
    words = iter(("first", "second", "third", "fourth", "fifth", "sixth"))

    def change(group: dict[str, Any]) -> None:
        for sample in group["samples"]:
            sample["sequences"] = [sequence(next(words), 0.125 * (order + 1)) for order in range(3)]
        group["samples"][1]["sequences"][2] |= {"logprobs": column([5.0])}

    text = page_of(client, change).run(f"{_DRAW} return draw({msgspec.json.encode(asked).decode()});")
    heading, _, rest = shown.rpartition(" ")
    assert heading in text
    assert [word for word in ("first", "second", "third", "fourth", "fifth", "sixth") if f" {word}" in text] == [rest]


def test_the_pictures_that_an_environment_added_are_shown(client: TestClient) -> None:
    """Those that are not kept by their hashes."""
    added = ["ab" * 32 + ".png", "cd" * 32]

    def change(group: dict[str, Any]) -> None:
        for sample in group["samples"]:
            sample["sequences"][0]["images"] += added

    text = page_of(client, change).run(f"{_DRAW} return draw({{}});")
    shown = f"<api/runs/0/images/{added[0]}>picture 2 was not kept: sha256 cdcdcdcdcdcd…"
    assert f"Pictures that the environment added:{shown}" in text


def test_a_conversation_shows_pictures_where_they_were_seen(client: TestClient) -> None:
    """The last ones of the sequence, in order, one for each placeholder. What is before them, as in the first
    observation, stands above; so does all that an environment added where there is no conversation."""
    first, second, lost = "12" * 32 + ".png", "34" * 32 + ".png", "cd" * 32
    texts = ["look", "<see>", "<image>", "</see>", "again", "<image>", "<image>", "here"]

    def change(group: dict[str, Any]) -> None:
        for sample in group["samples"]:
            sample["sequences"] = [sequence("x", *[0.0] * 5) | {
                "own": column([1, 0, 0, 0, 1, 0, 0, 1], "u1"), "texts": texts, "token_ids": column(range(8), "<i4"),
                "images": [*group["images"], first, second, lost, second], "placeholders": [2, 5, 6],
            }]  # fmt: skip
        group["samples"][1]["sequences"][0] |= {"own": column([1] * 8, "u1"), "placeholders": []}

    drawn = f'{_DRAW} return [await draw({{ sample: "0" }}), await draw({{ sample: "1" }})];'
    text, alone = page_of(client, change).run(drawn)
    above = f"Pictures that the environment added:<api/runs/0/images/{first}>"
    said = [
        "policy, turn 0look", f"environment<see><api/runs/0/images/{second}></see>", "policy, turn 1again",
        f"environmentpicture 4 was not kept: sha256 cdcdcdcdcdcd…<api/runs/0/images/{second}>", "policy, turn 2here",
    ]  # fmt: skip
    assert "".join([above, "Conversation", *said]) in text
    assert f"added:<api/runs/0/images/{first}><api/runs/0/images/{second}>picture 3 was not kept" in alone
    assert "Conversation" not in alone


def test_the_environment_s_answers_name_the_tools_that_were_called(client: TestClient) -> None:
    """By the turn before, also where that is in an earlier sequence; earlier releases did not record them."""

    def turn(tools: list[str] | None) -> dict[str, Any]:
        return {"num_output_tokens": 1, "replica_id": "e"} | ({} if tools is None else {"tools": tools})

    def change(group: dict[str, Any]) -> None:
        sample = group["samples"][0]
        sample["turns"] = [turn(["zoom"]), turn(["python", "zoom", "python"]), turn([]), turn(None)]
        first = sequence("x", 0.0) | {"own": column([1], "u1"), "texts": ["look"]}
        rest = ["saw", "run", "ran", "hm", "so", "end"]
        second = sequence("x", *[0.0] * 3) | {
            "own": column([0, 1, 0, 1, 0, 1], "u1"),
            "texts": rest,
            "token_ids": column(range(6), "<i4"),
        }
        sample["sequences"] = [first, second]

    text = page_of(client, change).run(f'{_DRAW} return draw({{ sample: "0", sequence: "1" }});')
    answers = ["environment: zoomsaw", "policy, turn 1run", "environment: python, zoomran", "policy, turn 2hm"]
    assert "".join([*answers, "environmentso", "policy, turn 3end"]) in text


def test_a_turn_says_where_and_when_it_was_played(scripts: ViewScripts) -> None:
    """When: after the sample's beginning. An agent's turn has no environment; turns of earlier runs know less."""
    earlier = {"replica_id": "engine-1", "waited_s": 0.25, "generated_s": 2.0, "reward": None,
               "num_prompt_tokens": 9, "num_cached_tokens": 4, "num_output_tokens": 6}  # fmt: skip
    turn = earlier | {"started_at": 1_700_000_003.5, "tools": ["zoom"], "environment_s": 90.0, "reward": 0.5}
    agents = turn | {"tools": [], "environment_s": 0.0, "reward": None}
    earlier_agents = agents | {"replica_id": "", "started_at": 0.0, "waited_s": 0.0, "generated_s": 0.0}
    sample = {"started_at": 1_700_000_000.0, "turns": [turn, earlier, agents, earlier_agents]}
    first, second, third, fourth = scripts.call("pages/group.js", "turnRows", sample)
    assert first == [0, "engine-1", "3.5\u00a0s", "250\u00a0ms", "2.0\u00a0s", "zoom", "1.5\u00a0min", 9, 4, 6, "0.5"]
    assert second == [1, "engine-1", "–", "250\u00a0ms", "2.0\u00a0s", "–", "–", 9, 4, 6, "–"]
    assert third == [2, "engine-1", "3.5\u00a0s", "250\u00a0ms", "2.0\u00a0s", "–", "–", 9, 4, 6, "–"]
    assert fourth == [3, "–", "–", "–", "–", "–", "–", 9, 4, 6, "–"]


def test_turns_are_counted_over_all_sequences(scripts: ViewScripts) -> None:
    """A sample whose history was cut goes on with its fourth turn."""
    first = {"own": column([1, 1, 0, 1, 0, 0, 1], "u1"), "texts": [*"abcdefg"], "images": []}
    second = {"own": column([0, 1, 1, 0, 0, 1], "u1"), "texts": ["tool", "a", "b", "\n", "saw ", "c"], "images": []}
    alone = {"own": column([1, 1], "u1"), "texts": ["a", "b"], "images": []}
    assert scripts.call("conversation.js", "messages", [first, second], 1) == [
        {"turn": None, "content": ["tool"]},
        {"turn": 3, "content": ["ab"]},
        {"turn": None, "content": ["saw"]},
        {"turn": 4, "content": ["c"]},
    ]
    turns = [each["turn"] for each in scripts.call("conversation.js", "messages", [first, second], 0)]
    assert turns == [0, None, 1, None, 2]
    assert scripts.call("conversation.js", "messages", [first, alone], 1) is None
