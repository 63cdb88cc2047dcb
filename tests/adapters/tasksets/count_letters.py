"""A taskset of text for verifiers: two questions each, the second after an answer."""

import verifiers.v1 as vf

WORDS = ("triangle", "circle", "square")


class CountData(vf.TaskData):
    answer: str


class CountTask(vf.Task[CountData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class CountEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn([vf.UserMessage(content="Are you sure?")])


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self) -> list[CountTask]:
        return [
            CountTask(CountData(idx=i, prompt=f"How many letters has {word}?", answer=str(len(word))), self.config.task)
            for i, word in enumerate(WORDS)
        ]


__all__ = ["CountEnv", "CountTaskset"]
