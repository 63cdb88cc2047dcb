"""Asks another host that runs `penstock doctor --serve`, and compares it with this one."""

import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pydantic

from penstock.errors import AccessError, ConfigError, SetupError, UnavailableError
from penstock.runtime.security import REFUSAL, Security
from services.doctor.finding import Finding, fault
from services.doctor.hosts.answering import PATIENCE_S
from services.doctor.hosts.clocks import ahead_s
from services.doctor.hosts.comparison import compare
from services.doctor.hosts.facts import HostFacts, Question, marker_file, own_facts, shared_folder
from services.recipe import Recipe

_ANSWER_TIMEOUT_S = 30.0
_PAUSE_S = 0.5


def ask(address: str, recipe: Recipe, security: Security, *, patience_s: float = PATIENCE_S) -> list[Finding]:
    """Return the findings on the host at `address`. Blocking.

    Args:
        address: host:port of a `penstock doctor --serve`.
        recipe: What the run needs.
        security: The token and TLS of both.
        patience_s: Seconds for it to begin to answer.
    """
    try:
        with _greeting(recipe) as question:
            facts, clock_s = _answer(address, question, security, patience_s=patience_s)
    except SetupError as error:
        return [fault("shared path", str(error), "set run.dir to a folder that all hosts share, and can write to")]
    except AccessError as error:
        return [fault(f"{address}: access", str(error), "set the same token on all hosts")]
    except UnavailableError as error:
        remedy = "run `penstock doctor --serve PORT` there, and let this host reach its ports"
        return [fault(f"{address}: name and port", str(error), remedy)]
    return list(compare(own_facts(recipe), facts, run=recipe.run, ahead_s=clock_s))


@contextmanager
def _greeting(recipe: Recipe) -> Iterator[Question]:
    """Yield the question; during the context, its marker is in the shared folder and is said on a port."""
    marker = secrets.token_hex(16)
    file = marker_file(recipe.run, marker)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise SetupError(f"{shared_folder(recipe.run)} cannot be written: {error.strerror}") from None
    try:
        with _listener(recipe.network.host) as listener:
            threading.Thread(target=_greet, args=(listener, marker), daemon=True).start()
            try:
                yield Question(marker=marker, advertised=recipe.network.advertised, port=listener.getsockname()[1])
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    finally:
        file.unlink(missing_ok=True)


def _listener(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(f"network.host = {host!r}: cannot listen there: {error.strerror}; correct it") from None


def _greet(listener: socket.socket, marker: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is closed
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(marker.encode())


def _answer(address: str, question: Question, security: Security, *, patience_s: float) -> tuple[HostFacts, float]:
    """Return the other host's answer, and the seconds by which its clock is ahead.

    Raises:
        AccessError: it asks for another token.
        UnavailableError: it did not answer, or not as a doctor does.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _exchange(address, question, security)
        except (OSError, http.client.HTTPException) as error:
            # A name without an address, or a port behind a firewall, may need a moment as well while a host starts.
            if time.monotonic() > deadline:
                raise UnavailableError(f"no answer: {getattr(error, 'strerror', None) or error}") from None
        time.sleep(_PAUSE_S)


def _exchange(address: str, question: Question, security: Security) -> tuple[HostFacts, float]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_ANSWER_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.connect()
        if security.tls is not None:
            context = security.tls.client_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=security.tls.server_name or host)
        headers = {"Content-Type": "application/json"}
        if security.token:
            headers["Authorization"] = f"Bearer {security.token}"
        asked_at = time.time()
        connection.request("POST", "/v1/host", question.model_dump_json(), headers)
        response = connection.getresponse()
        answered_at, body = time.time(), response.read()
    if response.status in (401, 403):
        raise AccessError(REFUSAL)
    try:
        facts = HostFacts.model_validate(json.loads(body))
    except (ValueError, pydantic.ValidationError):
        said = body[:200].decode(errors="replace")
        raise UnavailableError(f"it answers {response.status}, and not as this version's doctor does: {said}") from None
    return facts, ahead_s(asked_at=asked_at, heard_at=facts.heard_at, said_at=facts.said_at, answered_at=answered_at)
