"""Asks another host that runs `penstock doctor --serve`, and compares it with this one."""

import contextlib
import http.client
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pydantic

from penstock.errors import AccessError, SetupError, UnavailableError
from penstock.runtime.security import REFUSAL, Security
from services.doctor.finding import Finding, fault
from services.doctor.hosts.answering import PATIENCE_S
from services.doctor.hosts.clocks import ahead_s
from services.doctor.hosts.comparison import compare
from services.doctor.hosts.facts import HostFacts, Question, marker_file, own_facts, shared_folder
from services.doctor.hosts.ports import engine_ports, greeting, reach_all
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
        with _question(recipe) as question:
            facts, clock_s = _answer(address, question, security, patience_s=patience_s)
            unreached = reach_all(_host_of(address), facts.ports)
            _end(address, question, security)
    except SetupError as error:
        return [fault("shared path", str(error), "set run.dir to a folder that all hosts share, and can write to")]
    except AccessError as error:
        return [fault(f"{address}: access", str(error), "set the same token on all hosts")]
    except UnavailableError as error:
        remedy = "run `penstock doctor --serve PORT` there, and let this host reach its ports"
        return [fault(f"{address}: name and port", str(error), remedy)]
    return list(compare(own_facts(recipe), facts, run=recipe.run, ahead_s=clock_s, reach_errors=unreached))


@contextmanager
def _question(recipe: Recipe) -> Iterator[Question]:
    """Yield the question; during the context, its marker is in the shared folder and is said on this host's ports."""
    marker = secrets.token_hex(16)
    file = marker_file(recipe.run, marker)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise SetupError(f"{shared_folder(recipe.run)} cannot be written: {error.strerror}") from None
    try:
        with greeting(recipe.network.host, engine_ports(recipe), marker) as ports:
            yield Question(marker=marker, advertised=recipe.network.advertised, ports=ports)
    finally:
        file.unlink(missing_ok=True)


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


def _end(address: str, question: Question, security: Security) -> None:
    """Say that this host needs no more of the other."""
    ended_by_itself = contextlib.suppress(OSError, http.client.HTTPException)
    with ended_by_itself, _connected(address, security) as connection:
        connection.request("POST", f"/v1/host/{question.marker}/end", headers=_headers(security))
        connection.getresponse().read()


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


@contextmanager
def _connected(address: str, security: Security) -> Iterator[http.client.HTTPConnection]:
    host, port = _host_of(address), int(address.rpartition(":")[2])
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.connect()
        if security.tls is not None:
            context = security.tls.client_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=security.tls.server_name or host)
        yield connection


def _headers(security: Security) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return {**headers, "Authorization": f"Bearer {security.token}"} if security.token else headers


def _exchange(address: str, question: Question, security: Security) -> tuple[HostFacts, float]:
    with _connected(address, security) as connection:
        asked_at = time.time()
        connection.request("POST", "/v1/host", question.model_dump_json(), _headers(security))
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
