"""The addresses of a run whose processes are on several hosts, and settings that have another meaning there."""

from pathlib import Path
from typing import Final

from penstock.errors import ConfigError
from penstock.runtime.security import is_loopback
from services.recipe import Recipe

_JOB_FOLDERS: Final = "working_dir_files"
"""Part of the path at which Ray unpacks the files of a submitted job, which it removes after the job."""


def require_launchable(recipe: Recipe, folder: Path, *, resumed: Path | None = None) -> None:
    """Check settings that have another meaning on several hosts.

    Args:
        recipe: The recipe.
        folder: The working directory.
        resumed: Folder of the run to continue.

    Raises:
        ConfigError: the run folder would be lost, or all processes would tell the same address.
    """
    places = {"--resume": resumed, "run.folder": recipe.run.folder, "run.dir": recipe.run.dir}
    key, where = next((key, path) for key, path in places.items() if path is not None)
    if _JOB_FOLDERS in folder.parts and not where.is_absolute():
        raise ConfigError(
            f"{key} = {str(where)!r} is inside the folder of a submitted job, which Ray removes afterwards; give an "
            "absolute path, best on a file system that all hosts share"
        )
    if recipe.network.advertise_host:
        raise ConfigError(
            f"network.advertise_host = {recipe.network.advertise_host!r} would be told by the processes of all hosts; "
            "leave it empty: on Ray each tells the address of its own"
        )


def listening(recipe: Recipe, own: str) -> Recipe:
    """Return the recipe with an address on which other hosts reach its servers."""
    if not is_loopback(recipe.network.host):
        return recipe
    return recipe.model_copy(update={"network": recipe.network.model_copy(update={"host": own})})


def with_peers(recipe: Recipe, own: str) -> Recipe:
    """Return the recipe with the addresses that workers on other hosts call."""
    worker, security = recipe.worker, recipe.security
    update = {
        "router_address": worker.router_address or f"{own}:{recipe.router.port}",
        "reward_address": worker.reward_address or f"{own}:{recipe.reward.port}",
    }
    if worker.agents and not worker.router_url and recipe.router.http_port:
        scheme = "http" if security.tls_cert is None and security.tls_ca is None else "https"
        update["router_url"] = f"{scheme}://{own}:{recipe.router.http_port}"
    return recipe.model_copy(update={"worker": worker.model_copy(update=update)})
