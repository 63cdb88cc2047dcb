"""What the test suites of vLLM and SGLang ask of an OpenAI-compatible server, case by case, in words of our own.

A case is one request and what its answer must have. Left out is what needs another model or another engine feature
(LoRA variants, audio, video, embeddings), and what a model answers.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from penstock.v1 import generate_pb2
from tests.support.router.openai_harness import HI, IMAGE_ID, PNG, data_url
from tests.support.router.openai_tools import ADD, MULTIPLY

Check = Callable[[list[dict[str, Any]]], bool]
"""Of an answer: one object, or all events of a stream."""
AskedCheck = Callable[[list[generate_pb2.GenerateRequest]], bool]
"""Of what the engines were asked."""
SAYS = "It is 5"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request, and what to expect."""

    name: str
    path: str
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    says: str = SAYS
    """What the policy answers."""
    status: int = 200
    holds: Check = lambda _: True
    """Whether the answer is right. An error names a parameter of the request in any case."""
    asks: AskedCheck = lambda _: True
    """Whether the engines were asked for the right thing."""


def cases() -> dict[str, list[Case]]:
    """All of them, by what they are about."""
    return {
        "completions": list(_completions()),
        "grid": list(_sglang_grid()),
        "chats": list(_chats()),
        "tools": list(_tools()),
        "forms": list(_forms()),
        "images": list(_images()),
        "prompts": list(_prompts()),
        "routes": list(_routes()),
    }


def chat(
    name: str,
    says: str = SAYS,
    status: int = 200,
    holds: Check | None = None,
    asks: AskedCheck = lambda _: True,
    **body: Any,
) -> Case:
    """A case of /v1/chat/completions; without `holds`, the answer is what the policy says."""
    body.setdefault("messages", HI)
    path, holds = "/v1/chat/completions", holds or _is_said(says)
    return Case(name=f"chat: {name}", path=path, body=body, says=says, status=status, holds=holds, asks=asks)


def completion(
    name: str,
    says: str = SAYS,
    status: int = 200,
    holds: Check | None = None,
    asks: AskedCheck = lambda _: True,
    **body: Any,
) -> Case:
    """A case of /v1/completions; without `holds`, the answer is what the policy says, or its beginning."""
    body.setdefault("prompt", "Hello")
    path, holds = "/v1/completions", holds or _is_said(says)
    return Case(name=f"completion: {name}", path=path, body=body, says=says, status=status, holds=holds, asks=asks)


def _text(parts: list[dict[str, Any]]) -> str:
    return "".join(choice.get("text", "") for part in parts for choice in part["choices"])


def _is_said(says: str) -> Check:
    def holds(parts: list[dict[str, Any]]) -> bool:
        choices = [choice for part in parts for choice in part["choices"]]
        messages = [
            choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices
        ]
        texts = {choice["index"]: "" for choice in choices}
        for choice, message in zip(choices, messages, strict=True):
            texts[choice["index"]] += message.get("content") or ""
        return all(text and says.startswith(text) for text in texts.values())

    return holds


def _top_counts(parts: list[dict[str, Any]]) -> list[int]:
    found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice.get("logprobs")]
    return [len(top) for logprobs in found for top in logprobs["top_logprobs"] if top is not None]


def _counted(parts: list[dict[str, Any]]) -> bool:
    usage = parts[-1]["usage"]
    return bool(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"])


def _grid(echo: bool, logprobs: int | None, num_prompts: int, n: int) -> Check:
    """What an answer of SGLang's grid has."""

    def holds(parts: list[dict[str, Any]]) -> bool:
        indices = {choice["index"] for part in parts for choice in part["choices"]}
        text = _text(parts)
        return (
            indices == set(range(num_prompts * n))
            and text.count("I have") == (num_prompts * n if echo else 0)
            and (logprobs in _top_counts(parts) if logprobs else not _top_counts(parts))
        )

    return holds


def _sglang_grid() -> Iterator[Case]:
    """Echo, logprobs, several prompts, several choices, ids, streams: each with each."""
    ids = [40, 220, 71, 64, 85, 68]
    bools = [False, True]
    for echo, logprobs, is_list, n, is_ids, stream in itertools.product(bools, [None, 5], bools, [1, 2], bools, bools):
        one: Any = ids if is_ids else "I have"
        yield completion(
            f"grid echo={echo} logprobs={logprobs} list={is_list} n={n} ids={is_ids} stream={stream}",
            prompt=[one, one] if is_list else one,
            echo=echo,
            logprobs=logprobs,
            n=n,
            stream=stream,
            max_tokens=4,
            holds=_grid(echo and not is_ids, logprobs, 2 if is_list else 1, n) if not is_ids else _ids_grid(n, is_list),
        )


def _ids_grid(n: int, is_list: bool) -> Check:
    count = n * (2 if is_list else 1)
    return lambda parts: {choice["index"] for part in parts for choice in part["choices"]} == set(range(count))


def _completions() -> Iterator[Case]:
    yield completion("single", max_tokens=5, temperature=0.0, holds=_counted)
    yield completion("no logprobs", max_tokens=5, holds=lambda parts: parts[0]["choices"][0]["logprobs"] is None)
    yield completion("zero logprobs", logprobs=0, max_tokens=5, holds=lambda parts: set(_top_counts(parts)) == {1})
    for count in (1, 5, 10, 20):
        yield completion(f"{count} logprobs", logprobs=count, max_tokens=5, holds=_has_top(count))
    yield completion("too many logprobs", logprobs=21, status=400)
    yield completion("too many logprobs in a stream", logprobs=21, stream=True, status=400)
    yield completion("negative logprobs", logprobs=-2, status=400)
    for echo in (True, False):
        for count in (0, 1, 3, None):
            for n in (0, 1, None):
                yield completion(
                    f"echo={echo} logprobs={count} max_tokens={n}", echo=echo, logprobs=count, max_tokens=n,
                    holds=_echoes("Hello" if echo else "", count, n),
                )  # fmt: skip
    for count in (0, 1, 5):
        yield completion(
            f"prompt_logprobs={count}", prompt_logprobs=count, max_tokens=3,
            holds=lambda parts: parts[0]["choices"][0]["prompt_logprobs"][0] is None,
        )  # fmt: skip
    yield completion("negative prompt_logprobs", prompt_logprobs=-1, status=400)
    yield chat("prompt_logprobs", prompt_logprobs=1, holds=lambda parts: parts[0]["prompt_logprobs"][0] is None)
    yield completion("stream", stream=True, max_tokens=5, holds=lambda parts: len(parts) > 2)
    yield completion("parallel stream", stream=True, n=3, holds=lambda parts: _indices(parts) == {0, 1, 2})
    yield completion("batch", prompt=["a", "b"], holds=lambda parts: _indices(parts) == {0, 1})
    yield completion("batch stream", prompt=["a", "b"], stream=True, holds=lambda parts: _indices(parts) == {0, 1})
    yield completion("choices of a batch", prompt=["a", "b"], n=2, holds=lambda parts: _indices(parts) == {0, 1, 2, 3})
    yield completion("stop", stop=["is"], holds=lambda parts: _text(parts) == "It ")
    yield completion(
        "stop in the text", stop=["is"], include_stop_str_in_output=True, holds=lambda parts: _text(parts) == "It is"
    )
    yield completion("stop reason", stop=["is"], holds=lambda parts: parts[0]["choices"][0]["stop_reason"] == "is")
    for usage, continuous in itertools.product((False, True), repeat=2):
        options = {"include_usage": usage, "continuous_usage_stats": continuous}
        yield completion(
            f"stream_options {options}", stream=True, stream_options=options, holds=_usage(usage, continuous)
        )
        yield completion(f"whole with stream_options {options}", stream_options=options, status=400)
    yield completion("logit_bias", logit_bias={"0": 100}, max_tokens=5)
    yield completion("allowed_token_ids", allowed_token_ids=[5], max_tokens=5)
    yield completion("seed", seed=7, max_tokens=5)
    yield completion("id names", logprobs=1, return_tokens_as_token_ids=True, max_tokens=2, holds=_names_ids)
    yield completion("min_tokens", min_tokens=5, max_tokens=5, holds=lambda parts: _used(parts) == 5)
    yield completion("fewer min_tokens", min_tokens=2, max_tokens=5)
    yield completion("return_token_ids", return_token_ids=True, holds=lambda p: bool(p[0]["choices"][0]["token_ids"]))
    yield completion("skip_special_tokens", skip_special_tokens=False)


def _echoes(echoed: str, count: int | None, num_tokens: int | None) -> Check:
    """The prompt, if it is echoed, before what the policy says; each token with its likeliest, the first without."""

    def holds(parts: list[dict[str, Any]]) -> bool:
        choice, usage = parts[0]["choices"][0], parts[0]["usage"]
        said = choice["text"].removeprefix(echoed)
        is_text_right = choice["text"] == echoed + said and SAYS.startswith(said) and bool(said) == (num_tokens != 0)
        if num_tokens is not None and usage["completion_tokens"] != num_tokens:
            return False
        logprobs = choice["logprobs"]
        if count is None:
            return is_text_right and logprobs is None
        num_shown = usage["total_tokens"] if echoed else usage["completion_tokens"]
        own, likeliest = logprobs["token_logprobs"], logprobs["top_logprobs"]
        num_unknown = 1 if echoed else 0
        return (
            is_text_right
            and {len(logprobs[each]) for each in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
            == {num_shown}
            and (own[:num_unknown], likeliest[:num_unknown]) == ([None] * num_unknown, [None] * num_unknown)
            and all(isinstance(each, float) for each in own[num_unknown:])
            and {len(top) for top in likeliest[num_unknown:]} <= {max(1, count)}
        )

    return holds


def _has_top(count: int) -> Check:
    return lambda parts: count in _top_counts(parts)  # fewer where the texts of two ids are the same


def _used(parts: list[dict[str, Any]]) -> int:
    return int(parts[-1]["usage"]["completion_tokens"])


def _indices(parts: list[dict[str, Any]]) -> set[int]:
    return {choice["index"] for part in parts for choice in part["choices"]}


def _names_ids(parts: list[dict[str, Any]]) -> bool:
    return all(token.startswith("token_id:") for token in parts[0]["choices"][0]["logprobs"]["tokens"])


def _usage(is_asked: bool, is_continuous: bool) -> Check:
    def holds(parts: list[dict[str, Any]]) -> bool:
        with_usage = [bool(part.get("usage")) for part in parts]
        return all(with_usage[:-1]) == is_continuous and with_usage[-1] == (is_asked or is_continuous)

    return holds


def _chats() -> Iterator[Case]:
    yield chat("single", max_completion_tokens=5, holds=_counted)
    yield chat("several turns", messages=[*HI, {"role": "assistant", "content": "a"}, *HI])
    yield chat("developer", messages=[{"role": "developer", "content": "a"}, *HI])
    yield chat("own role", messages=[{"role": "critic", "content": "a"}, *HI])
    yield chat("extra field", messages=[{"role": "user", "content": "a", "extra": 1}])
    yield chat("name", messages=[{"role": "user", "content": "a", "name": "b"}])
    for logprobs, n, stream in itertools.product((None, 5), (1, 2), (False, True)):
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": logprobs} if logprobs else {}
        yield chat(f"grid logprobs={logprobs} n={n} stream={stream}", n=n, stream=stream, holds=_chat_top(logprobs),
                   **options)  # fmt: skip
    yield chat("no logprobs", logprobs=False, holds=lambda parts: parts[0]["choices"][0]["logprobs"] is None)
    yield chat("zero top_logprobs", logprobs=True, top_logprobs=0, holds=_chat_top(0))
    yield chat("too many top_logprobs", logprobs=True, top_logprobs=21, status=400)
    yield chat("too many top_logprobs in a stream", logprobs=True, top_logprobs=21, stream=True, status=400)
    yield chat("stream", stream=True, holds=lambda parts: len(parts) > 3)
    for usage in (False, True):
        for continuous in (False, True):
            options = {"include_usage": usage, "continuous_usage_stats": continuous}
            yield chat(
                f"stream_options {options}", stream=True, stream_options=options, holds=_usage(usage, continuous)
            )
    yield chat("whole with stream_options", stream_options={"include_usage": True}, status=400)
    yield chat("stop matched", stop=["is"], holds=lambda parts: parts[0]["choices"][0]["matched_stop"] == "is")
    yield chat("end matched", holds=lambda parts: isinstance(parts[0]["choices"][0]["matched_stop"], int))
    yield chat("none matched", max_tokens=1, holds=lambda parts: parts[0]["choices"][0]["matched_stop"] is None)
    yield chat("stop_regex", stop_regex="is")
    yield chat("ignore_eos", ignore_eos=True, max_tokens=30, holds=lambda parts: _used(parts) == 30)
    yield chat("penalty", frequency_penalty=0.5, presence_penalty=0.5)
    yield chat("seed", seed=7)
    yield chat("continue", messages=[*HI, {"role": "assistant", "content": "It"}], continue_final_message=True,
               add_generation_prompt=False, holds=_is_said(SAYS.removeprefix("It")))  # fmt: skip
    yield chat("template variables", chat_template_kwargs={"enable_thinking": False})
    yield chat("reasoning", says="<think>a</think>b", separate_reasoning=True,
               holds=lambda parts: parts[0]["choices"][0]["message"]["reasoning_content"] == "a")  # fmt: skip
    yield chat("max_tokens over the context", max_tokens=10**6, status=400)
    yield chat("negative max_tokens", max_tokens=-1, status=400)
    yield chat("wrong temperature", temperature=-1, status=400)
    yield chat("return_token_ids", return_token_ids=True, holds=lambda p: bool(p[0]["prompt_token_ids"]))
    yield chat("other model", model="other", status=404)


def _chat_top(count: int | None) -> Check:
    def holds(parts: list[dict[str, Any]]) -> bool:
        found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice.get("logprobs")]
        counts = {len(entry["top_logprobs"]) for logprobs in found for entry in logprobs["content"]}
        return counts == (set() if count is None else {count})

    return holds


def _tools() -> Iterator[Case]:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "add"}}
    for stream in (False, True):
        yield chat(f"tool stream={stream}", says=call, tools=[ADD], stream=stream, holds=_calls)
        yield chat(f"required stream={stream}", says=' {"a": 1}}\n</tool_call>', tools=[ADD], tool_choice="required",
                   stream=stream, holds=_calls)  # fmt: skip
        yield chat(f"named stream={stream}", says=' {"a": 1}}\n</tool_call>', tools=[ADD, MULTIPLY], tool_choice=named,
                   stream=stream, holds=_calls)  # fmt: skip
    yield chat("no tool", tools=[ADD], tool_choice="none")
    yield chat("one call", says=call + call, tools=[ADD], parallel_tool_calls=False, holds=_calls)
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    yield chat("strict", says=call, tools=[strict], holds=_calls)
    yield chat("required without tools", tool_choice="required", status=400)
    yield chat("unknown function", tools=[MULTIPLY], tool_choice=named, status=400)


def _calls(parts: list[dict[str, Any]]) -> bool:
    choices = [choice for part in parts for choice in part["choices"]]
    calls = [call for choice in choices for call in (choice.get("message") or choice["delta"]).get("tool_calls") or []]
    return [call["function"]["name"] for call in calls] == ["add"]


def _forms() -> Iterator[Case]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    of_json, of_regex, of_grammar = _form(json_schema=schema), _form(regex="a+"), _form(ebnf='root ::= "a"')
    forms: list[tuple[str, dict[str, Any], AskedCheck]] = [
        ("text", {"response_format": {"type": "text"}}, _form()),
        ("object", {"response_format": {"type": "json_object"}}, _form(json_schema={"type": "object"})),
        ("schema", {"response_format": json_schema}, of_json),
        ("structured json", {"structured_outputs": {"json": schema}}, of_json),
        ("structured regex", {"structured_outputs": {"regex": "a+"}}, of_regex),
        ("structured choice", {"structured_outputs": {"choice": ["a", "b"]}}, _form(ebnf='root ::= "a" | "b"')),
        ("structured grammar", {"structured_outputs": {"grammar": 'root ::= "a"'}}, of_grammar),
        ("regex", {"regex": "a+"}, of_regex),
        ("ebnf", {"ebnf": 'root ::= "a"'}, of_grammar),
    ]
    for name, form, asks in forms:
        yield chat(f"form {name}", asks=asks, **form)
    yield completion("form schema", response_format=json_schema, asks=of_json)
    yield completion("form regex", regex="a+", asks=of_regex)
    yield chat("no such form", response_format={"type": "other"}, status=400)
    yield chat("form without its schema", response_format={"type": "json_schema"}, status=400)
    yield chat("structural tag", response_format={"type": "structural_tag", "structures": [], "triggers": []})


def _form(**wanted: Any) -> AskedCheck:
    """The engine got this constraint and no other; none without one."""

    def asks(requests: list[generate_pb2.GenerateRequest]) -> bool:
        [request] = requests
        found = {field.name: value for field, value in request.sampling.constraint.ListFields()}
        if "json_schema" in found:
            found["json_schema"] = json.loads(found["json_schema"])
        return bool(found == wanted)

    return asks


def _shows(count: int) -> AskedCheck:
    """The engine got the image `count` times, each at its placeholder."""

    def asks(requests: list[generate_pb2.GenerateRequest]) -> bool:
        [request] = requests
        num_placeholders = list(request.input_ids).count(IMAGE_ID)
        return [image.data for image in request.images] == [PNG] * count and num_placeholders == count

    return asks


def _images() -> Iterator[Case]:
    url = data_url(PNG)
    image = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "Find x."}
    yield chat("image", messages=[{"role": "user", "content": [image, text]}], asks=_shows(1))
    yield chat("images", messages=[{"role": "user", "content": [image, image, text]}], asks=_shows(2))
    yield chat("image stream", messages=[{"role": "user", "content": [image, text]}], stream=True, asks=_shows(1))
    yield chat(
        "image turns",
        messages=[{"role": "user", "content": [image]}, {"role": "assistant", "content": "a"}, *HI],
        asks=_shows(1),
    )
    yield chat("image by uuid", messages=[{"role": "user", "content": [{**image, "uuid": "u"}, text]}], asks=_shows(1))
    yield chat("low detail", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, text]}], asks=_shows(1))  # fmt: skip
    web = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    yield chat("image by http", messages=[{"role": "user", "content": [web, text]}])
    yield chat("too many images", messages=[{"role": "user", "content": [image] * 33}], status=400)


def _prompts() -> Iterator[Case]:
    yield completion("empty prompt", prompt="", status=400)
    yield completion("no prompts", prompt=[], status=400)
    yield completion("empty ids", prompt=[[]], status=400)
    yield completion("ids", prompt=[1, 2, 3], asks=_prompts_are([1, 2, 3]))
    yield completion("lists of ids", prompt=[[1, 2], [3]], asks=_prompts_are([1, 2], [3]))
    yield completion("negative id", prompt=[-1], status=400)
    yield completion("large id", prompt=[2**40], status=400)
    yield completion("truncated", prompt="abcdef", truncate_prompt_tokens=2, holds=_prompt_tokens(2))
    yield completion("no truncation", prompt="abc", truncate_prompt_tokens=0, status=400)


def _prompts_are(*prompts: list[int]) -> AskedCheck:
    return lambda requests: sorted(list(request.input_ids) for request in requests) == sorted(prompts)


def _prompt_tokens(count: int) -> Check:
    return lambda parts: bool(parts[0]["usage"]["prompt_tokens"] == count)


def _routes() -> Iterator[Case]:
    def get(path: str, holds: Check = lambda _: True) -> Case:
        return Case(name=f"GET {path}", path=f"GET {path}", holds=holds)

    yield get("/v1/models", lambda parts: "max_model_len" in parts[0]["data"][0])
    for path in ("/health", "/version", "/ping", "/load", "/metrics"):
        yield get(path)
    yield Case(name="tokenize", path="/tokenize", body={"prompt": "a"}, holds=lambda parts: parts[0]["count"] == 1)
    yield Case(name="tokenize chat", path="/tokenize", body={"messages": HI}, holds=lambda p: bool(p[0]["tokens"]))
    yield Case(name="tokenize what a chat would answer", path="/tokenize", holds=lambda p: bool(p[0]["tokens"]),
               body={"messages": HI, "add_generation_prompt": True, "continue_final_message": False})  # fmt: skip
    yield Case(name="detokenize", path="/detokenize", body={"tokens": [64]}, holds=lambda p: p[0]["prompt"] == "a")
    yield Case(name="invocations", path="/invocations", body={"messages": HI})
