"""The contract of `proto/penstock/v1/reward.proto` as JSON."""

from typing import Annotated, Any

import pydantic
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse

from penstock.documented import Documented
from penstock.http.app import ErrorBody
from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.verdict import Method
from services.reward.verifier import Scored, Verifier

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The body is not JSON."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of range; the message names it."},
    429: {"model": ErrorBody, "description": "The queue is full; try again after Retry-After."},
    503: {"model": ErrorBody, "description": "The service is stopping; try again after Retry-After."},
}

_Strings = Annotated[list[str], pydantic.FailFast()]
"""Report only the first entry that is not a string: an error takes a kilobyte, and a client may send many."""


class _Model(Documented):
    model_config = pydantic.ConfigDict(extra="forbid")


class VerifyItem(_Model):
    """One response to verify."""

    golds: _Strings
    """Gold answers; one match suffices. At least one."""
    response: str
    """The model's output."""
    profile: str
    """Name of a profile, such as "math" or "geo3k"; /v1/profiles lists them."""
    item_id: str = ""
    """Your name for the item, returned in the verdict."""
    deadline_s: Annotated[float, pydantic.Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    """Wall-clock limit in seconds; 0 takes the service's limit."""
    prompt: str = ""
    """The prompt. Only custom verifiers and the profile "remote" read it."""


class VerifyBatch(_Model):
    """Many responses to verify."""

    items: Annotated[list[VerifyItem], pydantic.FailFast()]
    """The responses."""


class Verdict(_Model):
    """The verdict on one response."""

    item_id: str
    """The item's name."""
    score: float
    """The reward."""
    status: Status
    """How the score was reached; only with OK does it judge the answer."""
    extracted: str
    """The answer found in the response; empty if there is none."""
    method: Method
    """The method that decided."""
    elapsed_s: float
    """Seconds, without queueing."""


class Verdicts(_Model):
    """Many verdicts."""

    verdicts: list[Verdict]
    """In the order of the items."""


class ProfileText(_Model):
    """A profile."""

    name: str
    """Its name."""
    description: str
    """What it does, in one sentence."""


class Profiles(_Model):
    """All profiles."""

    profiles: list[ProfileText]
    """Sorted by name."""


_ONE = {"item_id": "a", "golds": ["5"], "response": "It is \\boxed{5}", "profile": "math"}


def add_routes(app: FastAPI, verifier: Verifier) -> None:
    """Add /v1/verify, /v1/verify:batch and /v1/profiles."""

    @app.post("/v1/verify", tags=["verify"], response_model=Verdict, responses=_REFUSALS)
    async def verify(item: Annotated[VerifyItem, Body(examples=[_ONE])]) -> JSONResponse:
        """Verify one response."""
        (verdict,) = await verifier.verify([_item(item)])
        return JSONResponse(_verdict(item.item_id, verdict))

    @app.post("/v1/verify:batch", tags=["verify"], response_model=Verdicts, responses=_REFUSALS)
    async def verify_batch(batch: Annotated[VerifyBatch, Body(examples=[{"items": [_ONE]}])]) -> JSONResponse:
        """Verify many responses; verdicts are in the order of the items."""
        verdicts = await verifier.verify([_item(item) for item in batch.items])
        pairs = zip(batch.items, verdicts, strict=True)
        return JSONResponse({"verdicts": [_verdict(item.item_id, verdict) for item, verdict in pairs]})

    @app.get("/v1/profiles", tags=["verify"], response_model=Profiles)
    async def list_profiles() -> Any:
        """List the profiles."""
        profiles = sorted(verifier.profiles.values(), key=lambda profile: profile.name)
        return {"profiles": [{"name": each.name, "description": each.description} for each in profiles]}


def _item(item: VerifyItem) -> Item:
    return Item(
        golds=item.golds,
        response=item.response,
        profile=item.profile,
        prompt=item.prompt,
        deadline_s=item.deadline_s,
    )


def _verdict(item_id: str, verdict: Scored) -> dict[str, Any]:
    finding = verdict.finding
    return {
        "item_id": item_id,
        "score": verdict.score,
        "status": finding.status,
        "extracted": finding.extracted,
        "method": finding.method,
        "elapsed_s": round(verdict.elapsed_s, 6),
    }
