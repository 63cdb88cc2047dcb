"""A policy calls tools: several in a turn, wrong ones too."""

import asyncio
import threading
import time
from typing import Any, Literal

import pytest

from penstock.environments import AssistantTurn, Tool, ToolEnvironment, ToolError, ToolResult
from penstock.errors import InvalidRequestError, UnavailableError
from penstock.records import ImagePart, TextPart
from tests.support.waiting import HANG_S
from tests.support.worker.tool_calls import task, texts, turn

OPEN = {"type": "object"}


def convert(length: float, unit: Literal["cm", "in"], places: int | None = None) -> str:
    """Convert a length to metres.

    Args:
        length: The length.
        unit: Its unit.
        places: Decimal places; null for all.
    """
    metres = length * {"cm": 0.01, "in": 0.0254}[unit]
    return str(metres if places is None else round(metres, places))


def tool(name: str, function: Any, **fields: Any) -> Tool:
    """A tool that takes anything."""
    return Tool(**{"name": name, "description": "", "parameters": OPEN, "function": function, **fields})


async def answers(environment: ToolEnvironment, said: AssistantTurn) -> list[str]:
    """What the tools answer."""
    return texts((await environment.step(said)).observation)


async def test_a_typed_function_with_a_docstring_is_a_tool() -> None:
    """Its types and its Args become the schema that the policy sees, and the calls are checked against it."""
    environment = ToolEnvironment([convert])
    [schema] = (await environment.reset(task())).tools
    function = schema["function"]
    assert (function["name"], function["description"]) == ("convert", "Convert a length to metres.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "length": {"type": "number", "description": "The length."},
            "unit": {"type": "string", "enum": ["cm", "in"], "description": "Its unit."},
            "places": {
                "anyOf": [{"type": "integer"}, {"type": "null"}],
                "description": "Decimal places; null for all.",
            },
        },
        "required": ["length", "unit"],
        "additionalProperties": False,
    }
    result = await environment.step(turn(("convert", {"length": 250, "unit": "cm", "places": None})))
    assert texts(result.observation) == ["2.5"]
    assert result.metrics == {"num_calls": 1, "num_failed_calls": 0, "tool_use": 1}


async def test_the_first_observation_shows_the_task_and_the_tools() -> None:
    """The row's messages and images, unchanged."""
    row = task(images=(b"picture",))
    first = await ToolEnvironment([tool("a", str), tool("b", str)]).reset(row)
    assert (first.messages, first.images) == (row.messages, row.images)
    assert [schema["function"]["name"] for schema in first.tools] == ["a", "b"]


async def test_a_row_chooses_among_the_tools() -> None:
    """By name; the others cannot be called."""
    environment = ToolEnvironment([tool("a", lambda: "A"), tool("b", lambda: "B")])
    first = await environment.reset(task(tools=({"type": "function", "function": {"name": "b"}},)))
    assert [schema["function"]["name"] for schema in first.tools] == ["b"]
    assert await answers(environment, turn(("a", {}), ("b", {}))) == ["There is no tool 'a'; the tools are: b.", "B"]


async def test_a_row_with_a_tool_that_nobody_answers_is_refused() -> None:
    """Otherwise the policy would be told of a tool that never works."""
    with pytest.raises(InvalidRequestError, match=r"name 'zoom'.* it has: a;"):
        await ToolEnvironment([tool("a", str)]).reset(task(tools=({"function": {"name": "zoom"}},)))


async def test_a_turn_without_a_call_is_the_end() -> None:
    """It is judged by the reward service."""
    result = await ToolEnvironment([convert]).step(turn(text="The answer is 5."))
    assert (result.observation, result.truncated, result.reward) == (None, False, None)
    assert result.metrics == {"num_calls": 0, "num_failed_calls": 0, "tool_use": 0}


async def test_the_calls_of_a_turn_run_at_once_and_are_answered_in_their_order() -> None:
    """Each waits for the other here: one after another they would never end. The later one ends first."""
    arrived, answered = asyncio.Event(), asyncio.Event()

    async def first() -> str:
        arrived.set()
        await answered.wait()
        return "first"

    async def second() -> str:
        await arrived.wait()
        answered.set()
        return "second"

    async with asyncio.timeout(HANG_S):
        environment = ToolEnvironment([tool("first", first), tool("second", second)])
        assert await answers(environment, turn(("first", {}), ("second", {}))) == ["first", "second"]


async def test_a_blocking_function_does_not_hold_up_the_others() -> None:
    """It runs in a thread: what it waits for comes from the event loop."""
    free = threading.Event()

    def blocking() -> str:
        return "free" if free.wait(HANG_S) else "stuck"

    async def freeing() -> str:
        free.set()
        return "freed"

    environment = ToolEnvironment([tool("blocking", blocking), tool("freeing", freeing)])
    assert await answers(environment, turn(("blocking", {}), ("freeing", {}))) == ["free", "freed"]


async def test_pictures_stand_in_their_own_tools_reply() -> None:
    """After its text, and counted through the observation."""
    both = tool("both", lambda: ToolResult(text="two", images=(b"1", b"2")))
    none, one = tool("none", lambda: "no picture"), tool("one", lambda: ToolResult(images=(b"3",)))
    result = await ToolEnvironment([both, none, one]).step(turn(("both", {}), ("none", {}), ("one", {})))
    assert result.observation is not None
    assert [(message.role, message.parts) for message in result.observation.messages] == [
        ("tool", (TextPart(text="two"), ImagePart(index=0), ImagePart(index=1))),
        ("tool", (TextPart(text="no picture"),)),
        ("tool", (ImagePart(index=2),)),
    ]
    assert result.observation.images == (b"1", b"2", b"3")


async def test_a_failing_tool_is_answered_in_words_and_its_neighbours_go_on() -> None:
    """Whatever it raises: other people's code, on what a policy wrote."""

    def refuse() -> str:
        raise ToolError("not today")

    def crash() -> str:
        return str({}["key"])

    def leave() -> str:
        raise SystemExit(3)

    async def leave_in_a_coroutine() -> str:
        raise SystemExit(2)

    async def slow() -> str:
        await asyncio.sleep(0)
        return "done"

    functions = {"refuse": refuse, "crash": crash, "leave": leave, "leave_2": leave_in_a_coroutine, "slow": slow}
    environment = ToolEnvironment([tool(*each) for each in functions.items()], max_calls_per_turn=len(functions))
    result = await environment.step(turn(*((name, {}) for name in functions)))
    assert texts(result.observation) == [
        "Error in refuse: not today",
        "Error in crash: it failed: KeyError: 'key'",
        "Error in leave: it failed: RuntimeError: SystemExit(3)",
        "Error in leave_2: it failed: RuntimeError: SystemExit(2)",
        "done",
    ]
    assert result.metrics == {"num_calls": 5, "num_failed_calls": 4, "tool_use": 1}


async def test_a_server_that_does_not_answer_is_no_fault_of_the_call() -> None:
    """To tell it to the policy would train on it: the environment fails."""

    async def ask() -> str:
        raise UnavailableError("the reward service is away")

    with pytest.raises(UnavailableError, match="the reward service is away"):
        await ToolEnvironment([tool("ask", ask)]).step(turn(("ask", {})))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'length' is a required property; 'unit' is a required property"),
        ({"length": "2.5", "unit": "cm"}, "length: '2.5' is not of type 'number'"),
        ({"length": True, "unit": "cm"}, "length: True is not of type 'number'"),
        ({"length": 1, "unit": "mile"}, "unit: 'mile' is not one of ['cm', 'in']"),
        ({"length": 1, "unit": "cm", "self": 1}, "Additional properties are not allowed ('self' was unexpected)"),
        ({"length": float("nan"), "unit": "cm"}, "NaN and infinity are no numbers of JSON"),
        ({"length": 1, "unit": ["cm", {"deep": float("inf")}]}, "NaN and infinity are no numbers of JSON"),
    ],
)
async def test_arguments_that_do_not_fit_are_answered_in_words(arguments: dict[str, Any], words: str) -> None:
    """The words name the argument and what is wrong with it."""
    result = await ToolEnvironment([convert]).step(turn(("convert", arguments)))
    assert texts(result.observation) == [f"Error in convert: the arguments do not fit: {words}"]
    assert result.metrics == {"num_calls": 1, "num_failed_calls": 1, "tool_use": 0}


async def test_long_words_are_cut_and_can_be_encoded() -> None:
    """A mistake quotes the argument, which may be megabytes; and what a tool returns may hold half a character."""
    environment = ToolEnvironment([convert, tool("half", lambda: "a\ud800b")])
    wrong = {"length": "\ud800" * 10**6, "unit": "cm"}
    [long, half] = await answers(environment, turn(("convert", wrong), ("half", {})))
    assert len(long) < 500
    assert half == "a\ufffdb"
    long.encode()


async def test_unknown_tools_and_calls_that_cannot_be_read_are_answered_in_words() -> None:
    """A turn with a broken call only is not the end either."""
    said = AssistantTurn.parse('<tool_call>{"name": "nope", "arguments": {}}</tool_call><tool_call>{oops</tool_call>')
    environment = ToolEnvironment([convert])
    result = await environment.step(said)
    assert texts(result.observation) == [
        "There is no tool 'nope'; the tools are: convert.",
        "This call cannot be read; write it as the tools' instructions show: {oops",
    ]
    assert result.metrics == {"num_calls": 2, "num_failed_calls": 2, "tool_use": 0}
    assert len(await answers(environment, AssistantTurn.parse("<tool_call>{oops</tool_call>"))) == 1


async def test_calls_beyond_the_limit_are_not_made() -> None:
    """One message speaks for all of them: a policy may write thousands."""
    made: list[int] = []
    environment = ToolEnvironment([tool("count", lambda number: made.append(number))], max_calls_per_turn=2)
    result = await environment.step(turn(*(("count", {"number": number}) for number in range(1000))))
    assert texts(result.observation) == ["", "", "Calls 3 to 1000 were not made: a turn may have 2."]
    assert sorted(made) == [0, 1]
    assert result.metrics == {"num_calls": 1000, "num_failed_calls": 998, "tool_use": 1}


async def test_a_plain_function_may_return_a_coroutine() -> None:
    """As a decorated one may, or an object with an async __call__; it has the same timeout."""

    async def look(word: str) -> str:
        return f"seen: {word}"

    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    tools = [tool("look", lambda word: look(word)), tool("hang", lambda: hang(), timeout_s=0.05)]
    assert await answers(ToolEnvironment(tools), turn(("look", {"word": "a"}), ("hang", {}))) == [
        "seen: a",
        "Error in hang: it took longer than 0.05 s and was ended",
    ]


async def test_an_async_tool_that_never_ends_is_cancelled() -> None:
    """The policy is told after its timeout."""
    cancelled = asyncio.Event()

    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    environment = ToolEnvironment([tool("hang", hang, timeout_s=0.01)])
    assert await answers(environment, turn(("hang", {}))) == ["Error in hang: it took longer than 0.01 s and was ended"]
    assert cancelled.is_set()


async def test_a_blocking_tool_that_never_ends_is_ended() -> None:
    """Python code ends at its next instruction: nothing goes on computing behind the episode's back."""
    threads: list[threading.Thread] = []

    def hang() -> str:
        threads.append(threading.current_thread())
        while True:
            time.monotonic()

    environment = ToolEnvironment([tool("hang", hang, timeout_s=0.05)])
    [words] = await answers(environment, turn(("hang", {})))
    assert words == "Error in hang: it took longer than 0.05 s and was ended"
    await asyncio.to_thread(threads[0].join, HANG_S)
    assert not threads[0].is_alive()


@pytest.mark.parametrize(("own", "rows"), [(3, None), (None, 3), (3, 9), (9, 3)])
async def test_calls_in_the_last_turn_are_not_made(own: int | None, rows: int | None) -> None:
    """Nobody would see their answers: the episode ends as truncated. The turn before it is told."""
    made: list[int] = []
    environment = ToolEnvironment([tool("count", lambda: made.append(1))], max_turns=own)
    await environment.reset(task(max_turns=rows))
    last_words = "One turn is left: give the final answer without a call."
    assert await answers(environment, turn(("count", {}))) == [""]
    assert await answers(environment, turn(("count", {}))) == [last_words]
    result = await environment.step(turn(("count", {})))
    assert (result.observation, result.truncated, len(made)) == (None, True, 2)


async def test_tools_that_are_not_shown_are_there_all_the_same() -> None:
    """Rows may explain them in their own words."""
    environment = ToolEnvironment([tool("count", lambda: "one")], show_tools=False)
    assert (await environment.reset(task())).tools == ()
    assert await answers(environment, turn(("count", {}))) == ["one"]


async def test_the_last_step_tells_what_the_episode_came_to() -> None:
    """Of each sample, the metrics of its last step are reported; that step is the answer, which calls nothing."""
    environment = ToolEnvironment([convert])
    await environment.reset(task())
    for _ in range(2):
        await environment.step(turn(("convert", {"length": 1, "unit": "cm"}), ("missing", {})))
    assert (await environment.step(turn(text="5"))).metrics == {"num_calls": 4, "num_failed_calls": 2, "tool_use": 1}


async def test_an_answer_in_the_last_turn_ends_the_episode_whole() -> None:
    """Truncated is only what goes on calling."""
    assert not (await ToolEnvironment([convert], max_turns=1).step(turn(text="5"))).truncated


async def test_all_tools_are_closed_with_the_episode() -> None:
    """One that fails does not keep the next from it, and the failure is told."""
    closed: list[str] = []

    async def fail() -> None:
        raise OSError("stuck")

    async def close() -> None:
        closed.append("b")

    with pytest.raises(OSError, match="stuck"):
        await ToolEnvironment([tool("a", str, close=fail), tool("b", str, close=close)]).close()
    assert closed == ["b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "two words"}, "tool name 'two words' must be"),
        ({"timeout_s": 0}, "timeout_s = 0 must be above 0"),
        ({"parameters": {"type": "objekt"}}, "not a JSON schema: 'objekt'"),
        ({"parameters": {"type": "string"}}, 'with "type": "object"'),
    ],
)
def test_a_tool_that_cannot_work_is_refused_when_it_is_made(fields: dict[str, Any], words: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=words):
        tool(**{"name": "a", "function": str, **fields})


def test_an_environment_that_cannot_work_is_refused_when_it_is_made() -> None:
    """Two tools of one name, or limits below 1."""
    with pytest.raises(ValueError, match="each needs a name of its own"):
        ToolEnvironment([tool("a", str), tool("a", str)])
    with pytest.raises(ValueError, match="max_calls_per_turn = 0"):
        ToolEnvironment([], max_calls_per_turn=0)


async def test_a_result_of_parts_keeps_their_order() -> None:
    """Texts and images as the tool gave them; what is said of the last turn comes behind them."""
    mixed = tool("mixed", lambda: ToolResult(parts=(b"1", "between", b"2")))
    environment = ToolEnvironment([mixed], max_turns=2)
    await environment.reset(task())
    observation = (await environment.step(turn(("mixed", {})))).observation
    assert observation is not None
    [message] = observation.messages
    *parts, last = message.parts
    assert parts == [ImagePart(index=0), TextPart(text="between"), ImagePart(index=1)]
    assert observation.images == (b"1", b"2")
    assert last == TextPart(text="\nOne turn is left: give the final answer without a call.")


def test_a_result_has_parts_or_text_and_images() -> None:
    """Which of them came first could not be told."""
    with pytest.raises(ValueError, match="put the text and the images into its parts"):
        ToolResult(text="a", parts=(b"1",))
