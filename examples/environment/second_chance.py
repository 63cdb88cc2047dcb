"""An environment of your own: a wrong answer gets a second chance, for half of the reward."""

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.records import Message, TextPart


class SecondChance:
    """Says once that an answer is wrong, and takes another."""

    async def reset(self, task: Task) -> Observation:
        self.task = task
        self.num_turns = 0
        return Observation(messages=task.messages, images=task.images, tools=task.tools)

    async def step(self, turn: AssistantTurn) -> StepResult:
        self.num_turns += 1
        verdict = await self.task.grade(turn.text)
        is_first = self.num_turns == 1
        metrics = {"first_attempt": verdict.score} if is_first and verdict.is_judged else {}
        # A reward of an answer that was not judged leaves the sample unjudged: an outage is not a wrong answer.
        if not is_first or not verdict.is_judged or verdict.score == 1.0:
            reward = verdict.score if is_first else 0.5 * verdict.score
            return StepResult(observation=None, reward=reward, metrics=metrics)
        reply = Message(role="user", parts=(TextPart(text="That is wrong. Look again."),))
        return StepResult(observation=Observation(messages=(reply,)), metrics=metrics)

    async def close(self) -> None:
        """Nothing is held."""
