"""An agent for the tiny recipe, as it stands: a wrong answer gets a second try.

PYTHONPATH=examples/agent penstock train tiny-cpu examples/agent/recipe.toml --trainer.num_steps=20
"""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from penstock.agents import AgentSession


async def play(session: AgentSession) -> float:
    """Ask until the reward service accepts the answer, twice at most; the second try is worth half."""
    messages = [*session.messages]
    http_client = DefaultAsyncHttpxClient(verify=session.tls or True)
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, timeout=session.timeout_s + 75, http_client=http_client
    ) as client:
        for reward in (1.0, 0.5):
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            said = answer.choices[0].message
            verdict = await session.task.grade(said.content or "")
            if verdict.score == 1.0:
                return reward
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "Wrong. Look again."}]
    return 0.0
