"""A policy that does what the clients' examples need, whatever words they come in."""

import dataclasses

from penstock.model.chat.chat_template import Renderer
from penstock.testing.answers import Saying
from penstock.v1 import common_pb2, generate_pb2
from tests.support.router.openai_harness import END_ID

_ARGUMENTS = '{"a": 2, "b": 3}'
_CALL = f'<tool_call>\n{{"name": "add", "arguments": {_ARGUMENTS}}}\n</tool_call>'


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedPolicy:
    """Calls `add` with 2 and 3 if there are tools, says JSON if it must, and else that it is 5."""

    renderer: Renderer

    def __call__(
        self, request: generate_pb2.GenerateRequest, replica: common_pb2.Replica
    ) -> generate_pb2.GenerateResponse:
        """Answer."""
        text = self._text(request)
        return Saying([*self.renderer.render_text(text), END_ID])(request, replica)

    def _text(self, request: generate_pb2.GenerateRequest) -> str:
        prompt = self.renderer.decode(request.input_ids)
        if prompt.endswith('"arguments":'):
            return f" {_ARGUMENTS}}}\n</tool_call>"
        if prompt.endswith('{"name": "'):
            return f'add", "arguments": {_ARGUMENTS}}}\n</tool_call>'
        if request.sampling.HasField("constraint"):
            return _ARGUMENTS
        if "<tools>" in prompt and "\n<tool_response>" not in prompt:
            return _CALL
        return "It is 5"
