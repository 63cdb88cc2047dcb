"""A FastAPI application with one error format and strict JSON."""

import reprlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pydantic
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from penstock.errors import PenstockError
from penstock.http.body_parsing import parse_body, prepare_parsing
from penstock.http.boundary import error_response
from penstock.http.json_body import parse_json
from penstock.http.status import status_of

_MAX_ERRORS = 5
_SHORT = reprlib.Repr()  # takes constant time for any value
_SHORT.maxstring = _SHORT.maxother = 80


class ErrorText(pydantic.BaseModel):
    """An error's code and message."""

    code: str
    """For programs: INVALID_REQUEST, OVERLOADED and others."""
    message: str
    """For people: the field, the value and the remedy."""


class ErrorBody(pydantic.BaseModel):
    """The body of every error."""

    error: ErrorText


def make_app(*, title: str, description: str, version: str) -> FastAPI:
    """Return an application without routes; handlers raise the errors of `penstock.errors`."""
    app = FastAPI(title=title, description=description, version=version, strict_content_type=False)
    app.router.route_class = StrictJsonRoute
    prepare_parsing(app)
    app.add_exception_handler(PenstockError, _answer_error)
    app.add_exception_handler(TimeoutError, _answer_error)
    app.add_exception_handler(Exception, _answer_crash)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    return app


class StrictJsonRoute(APIRoute):
    """Reads bodies with `penstock.http.json_body`, which rejects duplicate keys; large ones beside the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request, self._read))
            except _WrongBodyError as wrong:
                raise RequestValidationError(wrong.errors) from None

        return handle_strictly

    def _read(self, body: bytes) -> Any:
        """Return the JSON value of a body; where the route takes a model, that model, which FastAPI leaves as it is."""
        value = parse_json(body, unique_keys=True)
        if self.body_field is None or self.dependant.body_params != [self.body_field]:  # parameters share it
            return value
        model, errors = self.body_field.validate(value, {}, loc=("body",))
        if errors:
            raise _WrongBodyError(errors)
        return model if isinstance(model, pydantic.BaseModel) else value


class _WrongBodyError(HTTPException):
    """Carries the errors of a body through FastAPI, which replaces all but HTTP errors by its own message."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__(422)
        self.errors = errors


class _StrictRequest(Request):
    def __init__(self, request: Request, read: Callable[[bytes], Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._read = read

    async def json(self) -> Any:
        try:
            return await parse_body(self, self._read)
        except PenstockError as error:  # otherwise FastAPI would write its own message
            raise HTTPException(status_of(error), str(error)) from None


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_response(status_of(error), str(error) or "the deadline passed")


async def _answer_crash(_: Request, error: Exception) -> Response:
    return error_response(500, f"{type(error).__name__}: {error}")  # Starlette raises it again to log it


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _answer_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(422, describe(error.errors()))


def describe(errors: Sequence[Any]) -> str:
    """Describe the first of pydantic's errors in one line: field, fault and value."""
    lines = []
    for error in errors[:_MAX_ERRORS]:
        field = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
        match error["type"]:
            case "missing":
                lines.append(f"{field} is missing")
            case "extra_forbidden":
                lines.append(f"{field} is unknown; leave it out")
            case _ if isinstance(error.get("input"), bytes):
                lines.append("the body is not declared as JSON; send the header Content-Type: application/json")
            case _:
                lines.append(f"{field} = {_SHORT.repr(error.get('input'))}: {error['msg']}")
    more = len(errors) - _MAX_ERRORS
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
