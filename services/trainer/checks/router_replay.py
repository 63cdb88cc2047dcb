"""Whether a run can replay the routing of its engines. Pure, so that it is checked before anything heavy is loaded."""

from penstock.errors import ConfigError


def pairs_contradiction(router_replay: bool, *, has_pairs: bool) -> str:
    """Return why engines cannot report the experts of whole sequences; empty if they can.

    Args:
        router_replay: `trainer.router_replay`.
        has_pairs: Whether the recipe has prefill or decode engines.
    """
    if not (router_replay and has_pairs):
        return ""
    return (
        "trainer.router_replay = true does not go with prefill and decode engines: the prompt's experts stay in the "
        "prefill engine, and no engine knows those of a whole sequence; use unified engines (rollout.replicas), or "
        "leave it out"
    )


def require_mixture(router_replay: bool, *, num_experts: int) -> None:
    """Check that there is something to replay.

    Args:
        router_replay: `trainer.router_replay`.
        num_experts: Experts of a layer; 0 for a dense model.

    Raises:
        ConfigError: the model is dense.
    """
    if router_replay and num_experts == 0:
        raise ConfigError(
            "trainer.router_replay = true is for mixtures of experts, and model.path has a dense model; leave it out"
        )
