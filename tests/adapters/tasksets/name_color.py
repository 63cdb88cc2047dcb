"""A taskset of pictures for verifiers: a coloured square in the prompt, another one in the second turn."""

import verifiers.v1 as vf
from PIL import Image
from verifiers.v1.utils.image import image_data_url

COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


def show(color: str, text: str) -> vf.UserMessage:
    """A message with a square of this colour."""
    url = image_data_url(Image.new("RGB", (96, 96), COLORS[color]))
    return vf.UserMessage(
        content=[
            vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=url)),
            vf.TextContentPart(text=text),
        ]
    )


class ColorData(vf.TaskData):
    answer: str


class ColorTask(vf.Task[ColorData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class ColorEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn([show("blue", "And now?")])


class ColorTaskset(vf.Taskset[ColorTask, vf.TasksetConfig]):
    def load(self) -> list[ColorTask]:
        return [ColorTask(ColorData(idx=0, prompt=[show("red", "Which colour?")], answer="blue"), self.config.task)]


__all__ = ["ColorEnv", "ColorTaskset"]
