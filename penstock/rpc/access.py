"""Which token a call needs: the run's own for what can change its policy, the common one for everything else.

Whoever is given the common token, to have answers verified or generated, must not be able to write an engine's weights
or to end it.
"""

from penstock.runtime.security import Security

_CONTROL = (
    "/penstock.v1.RolloutService/",  # weights, draining
    "/penstock.v1.RouterService/DrainReplica",
    "/penstock.v1.TrainerService/",
)


def token_of(method: str, security: Security) -> str:
    """The token that a call of `method` (/package.Service/Method) needs; empty: none."""
    return (method.startswith(_CONTROL) and security.control_token) or security.token
