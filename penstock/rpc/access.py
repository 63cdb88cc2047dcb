"""Chooses a call's token: the run's control token for calls that can change its policy, else the common one.

A client that holds the common token, for verification or generation, must not be able to write an engine's weights or
to stop the engine.
"""

from penstock.runtime.security import Security

_CONTROL = (
    "/penstock.v1.RolloutService/",  # weights, draining
    "/penstock.v1.RouterService/DrainReplica",
    "/penstock.v1.TrainerService/",
)


def token_of(method: str, security: Security) -> str:
    """Return the token that a call of `method` (/package.Service/Method) needs; empty: none."""
    return (method.startswith(_CONTROL) and security.control_token) or security.token
