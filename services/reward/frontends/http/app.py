"""The HTTP application: all frontends over one verifier."""

import importlib.metadata

from fastapi import FastAPI

from penstock.http.app import make_app
from penstock.http.metrics import add_metrics_page
from services.reward.config import RewardConfig
from services.reward.frontends.http import native, openrlhf, slime
from services.reward.profiles.registry import find_profile
from services.reward.verifier import Verifier

_DESCRIPTION = """
Is this response right? Send gold answers and a response; get a score, a status that explains it, and the answer that
was found. The status says when a response could not be verified: that is never an error or a silent 0.

The same service speaks gRPC (`penstock.v1.RewardService`) and the protocols of two trainers: slime's `remote_rm` at `/`
and OpenRLHF's remote reward model at `/get_reward`.
"""


def make_http_app(verifier: Verifier, config: RewardConfig) -> FastAPI:
    """Build the application.

    Raises:
        InvalidRequestError: reward.http_profile does not name a profile.
    """
    find_profile(verifier.profiles, config.http_profile)
    app = make_app(
        title="Penstock reward service", description=_DESCRIPTION, version=importlib.metadata.version("penstock")
    )
    native.add_routes(app, verifier)
    slime.add_routes(app, verifier, config)
    openrlhf.add_routes(app, verifier, config)

    @app.get("/healthz", tags=["operation"])
    async def healthz() -> dict[str, str]:
        """Return 200 while the service takes work; 503 while it is stopping."""
        return {"status": "serving"}

    add_metrics_page(app)
    _name_profiles(app, sorted(verifier.profiles))
    return app


def _name_profiles(app: FastAPI, names: list[str]) -> None:
    """List the profiles in the OpenAPI page wherever a field names one."""
    page = app.openapi()  # FastAPI keeps it
    page["components"]["schemas"]["VerifyItem"]["properties"]["profile"]["enum"] = names
    for path in page["paths"].values():
        for parameter in path.get("post", {}).get("parameters", ()):
            if parameter["name"] == "profile":
                parameter["schema"]["enum"] = names
