"""An agent that Penstock trains: a loop of your own around the OpenAI client, in your own process.

    PYTHONPATH=examples/agent penstock train RECIPE guesser.toml

docs/rollouts/agents.md shows guesser.toml, and says how the agent is trained.
"""

import json

from openai import AsyncOpenAI

from penstock.agents import AgentSession

GUESS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [{"type": "function", "function": {"name": "guess", "description": "Guess it.", "parameters": GUESS}}]


async def play(session: AgentSession) -> float:
    """Let the policy guess the row's number; the fewer guesses it takes, the higher the reward."""
    messages, secret = [*session.messages], int(session.task.golds[0])
    timeout_s = session.timeout_s + 75  # the router keeps what came of a first answer when the time is over
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=timeout_s) as client:
        for turn in range(5):
            answer = await client.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                number = json.loads(call.function.arguments).get("number")
                if number == secret:
                    return 1.0 - 0.1 * turn
                hint = "Say an integer." if not isinstance(number, int) else "Higher." if number < secret else "Lower."
                messages.append({"role": "tool", "tool_call_id": call.id, "content": hint})
    return 0.0
