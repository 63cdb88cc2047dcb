"""`penstock replicas`: lists the replicas that the router sees, or drains one."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock import shipped
from penstock.errors import ConfigError
from penstock.runtime.security import Security
from services.cli.arguments import RecipeGroup, overrides_of
from services.recipe import Recipe

_HELP = """List the replicas that the router sees, or drain one.

Any --section.key=value overrides the recipe. With --address, --security.key=value says how the router is reached.
"""

app = typer.Typer(cls=RecipeGroup, help=_HELP, invoke_without_command=True)

Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        help="Recipe (TOML) whose router section has host and port; a further --config overrides it.",
        show_default=False,
    ),
]
Address = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="The router; default: by the recipe.")]


@app.callback()
def list_replicas(
    context: typer.Context,
    config: Config = None,
    address: Address = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the replicas that the router sees: role, state, version, load, KV use, calls in flight of the limit."""
    if context.invoked_subcommand is not None:
        if config or address or as_json:
            raise ConfigError(f"options of `penstock replicas {context.invoked_subcommand}` come after its name")
        return 0
    router_address, security = _find_router(config, address, overrides_of(context))
    from services.cli.replicas import table as replica_table  # imports gRPC, so only after the arguments are checked

    pool = replica_table.fetch_pool(router_address, security)
    if as_json:
        sys.stdout.write(json.dumps(replica_table.describe_pool(pool), indent=2) + "\n")
    else:
        replica_table.print_pool(pool)
    return 0


@app.command()
def drain(
    context: typer.Context,
    replica_id: Annotated[str, typer.Argument(metavar="ID", help="The replica, as `penstock replicas` names it.")],
    config: Config = None,
    address: Address = "",
    grace_s: Annotated[
        float,
        typer.Option("--grace-s", min=0, help="Seconds for running requests; then other replicas continue them."),
    ] = 30.0,
) -> int:
    """Stop new calls to a replica, and wait until its running ones have ended."""
    router_address, security = _find_router(config, address, overrides_of(context))
    from services.cli.replicas import table as replica_table

    drained = replica_table.drain(router_address, replica_id, grace_s=grace_s, security=security)
    sys.stdout.write(
        f"replica {replica_id} is empty: {drained.num_finished} requests finished, "
        f"{drained.num_handed_over} handed over; it takes no more until it is started again\n"
    )
    return 0


def _find_router(config: list[Path] | None, address: str, overrides: list[str]) -> tuple[str, Security]:
    """Return the router's address, and the secrets for it."""
    if address and config:
        raise ConfigError(f"--address {address} and --config {config[0]} both name a router; leave out one")
    if address and (others := [each for each in overrides if not each.startswith("--security.")]):
        raise ConfigError(f"--address {address} names a router with settings of its own; leave out {others[0]}")
    recipe = configuration.load(Recipe, [shipped.find_recipe(path) for path in config or ()], overrides)
    if address:
        return address, Security.load(recipe.security)
    router = recipe.router
    if router.port == 0:
        source = f"recipe {', '.join(map(str, config))}" if config else "without a recipe it"
        raise ConfigError(
            f"router.port = 0 ({source} leaves it open): give --address HOST:PORT, or --config RUN/live.toml"
        )
    return f"{recipe.network.local}:{router.port}", Security.load(recipe.security)
