"""instructor, in its modes."""

import sys

from common import report

try:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel
except ImportError as error:
    sys.exit(report(error))


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int


url, model = sys.argv[1:]


def ask(mode: instructor.Mode, form: type[Numbers]) -> dict[str, int]:
    """Extract in this mode."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    messages = [{"role": "user", "content": "2 and 3"}]
    return client.chat.completions.create(
        model=model, messages=messages, response_model=form, max_retries=0
    ).model_dump()


report(
    {
        "required": ask(instructor.Mode.TOOLS, Numbers),
        "json": ask(instructor.Mode.JSON, Numbers),
        "structured": ask(instructor.Mode.JSON_SCHEMA, Numbers),
    }
)
