"""An OpenAI-compatible server that says and refuses what it is told."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Api:
    """A server: what it answers, and what it was asked."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["m"])
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Given first, one to each request for a completion."""
    retry_after: str = ""
    """The header that goes with them; empty: none."""
    breaks_at: str = ""
    """Text of the prompts at which it fails; empty: none."""
    breaks_with: int = 500
    """Status with which it fails there; 0: none, it closes the connection."""
    moved_to: str = ""
    """URL of the API to which it redirects every request; empty: it answers itself."""
    page: str = ""
    """What it answers when it is asked for its models, in place of JSON; empty: the models."""
    page_status: int = 200
    is_reasoning: bool = False
    """Whether it refuses `max_tokens`, and temperatures other than 1, as OpenAI does for its reasoning models."""
    text: str = "so \\boxed{3}"
    finish_reason: str = "stop"
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    num_answers: int | None = None
    """Answers that it gives before it hangs; None: all."""
    hangs: threading.Event = field(default_factory=threading.Event)
    """Set once a request is left without an answer."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends the requests that hang, without an answer."""


@contextlib.contextmanager
def serving_api() -> Iterator[Api]:
    """Serve on a free port of this machine."""
    found = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if found.moved_to:
                self._redirect()
                return
            models = json.dumps({"data": [{"id": name} for name in found.models]})
            self._send_text(
                found.page_status, found.page or models, kind="text/html" if found.page else "application/json"
            )

        def do_POST(self) -> None:
            found.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found.keys.add(self.headers.get("Authorization", ""))
            if found.moved_to:
                self._redirect()
                return
            if found.breaks_at and found.breaks_at in json.dumps(found.requests[-1]["messages"]):
                if found.breaks_with:
                    self._send(found.breaks_with, {"error": "internal error"})
                else:
                    self.close_connection = True
                return
            if found.refusals:
                status, reason = found.refusals.pop(0)
                self._send(status, {"error": reason})
                return
            if found.is_reasoning and (error := _refusal_of_reasoning(found.requests[-1])):
                self._send(400, {"error": error})
                return
            if found.num_answers is not None and len(found.requests) > found.num_answers:
                found.hangs.set()
                found.released.wait()
                self.close_connection = True
                return
            choice = {"message": {"content": found.text}, "finish_reason": found.finish_reason}
            self._send(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

        def _redirect(self) -> None:
            self.send_response(301)
            self.send_header("Location", f"{found.moved_to}{self.path.removeprefix('/v1')}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, status: int, content: dict[str, Any]) -> None:
            self._send_text(status, json.dumps(content), kind="application/json")

        def _send_text(self, status: int, text: str, *, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status == 429 and found.retry_after:
                self.send_header("Retry-After", found.retry_after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _refusal_of_reasoning(request: dict[str, Any]) -> dict[str, str] | None:
    """OpenAI's error, word for word."""
    if "max_tokens" in request:
        return {
            "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "unsupported_parameter",
        }
    if request.get("temperature", 1) != 1:
        return {
            "message": f"Unsupported value: 'temperature' does not support {request['temperature']} with this model. "
            "Only the default (1) value is supported.",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "unsupported_value",
        }
    return None
