"""The contract of `proto/penstock/v1/reward.proto` as JSON."""

from typing import Annotated, Any

import pydantic
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse

from penstock.http.app import ErrorBody
from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.verdict import Method
from services.reward.verifier import Scored, Verifier

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The body is no JSON."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of range; the message names it."},
    429: {"model": ErrorBody, "description": "The queue is full; come back after the header Retry-After."},
    503: {"model": ErrorBody, "description": "The service is stopping; come back after the header Retry-After."},
}

_Strings = Annotated[list[str], pydantic.FailFast()]
"""The first that is none is told; a kilobyte for each would be memory for whoever sends many."""


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)


class VerifyItem(_Model):
    """One response to verify."""

    golds: _Strings
    """Gold answers; one match suffices. At least one."""
    response: str
    """The model's own text."""
    profile: str
    """Profile by name, such as "math" or "geo3k"; /v1/profiles has them all."""
    item_id: str = ""
    """Your name for it, given back in the verdict."""
    deadline_s: Annotated[float, pydantic.Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    """Wall-clock limit in seconds; 0 takes the service's."""
    prompt: str = ""
    """What was asked. Only custom verifiers and the profile "remote" look at it."""


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
    """How it was reached; only with OK does the score say something of the answer."""
    extracted: str
    """The answer found in the response; empty if there was none."""
    method: Method
    """What decided."""
    elapsed_s: float
    """Seconds that it took, queueing excluded."""


class Verdicts(_Model):
    """Many verdicts."""

    verdicts: list[Verdict]
    """In the order of the items."""


class ProfileText(_Model):
    """What a profile is."""

    name: str
    """Its name."""
    description: str
    """What it does, in a sentence."""


class Profiles(_Model):
    """All profiles."""

    profiles: list[ProfileText]
    """By name."""


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
        """Verify many responses; the verdicts come in their order."""
        verdicts = await verifier.verify([_item(item) for item in batch.items])
        pairs = zip(batch.items, verdicts, strict=True)
        return JSONResponse({"verdicts": [_verdict(item.item_id, verdict) for item, verdict in pairs]})

    @app.get("/v1/profiles", tags=["verify"], response_model=Profiles)
    async def list_profiles() -> Any:
        """Tell which profiles there are."""
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
