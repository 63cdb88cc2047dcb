"""One engine's part in prefill/decode disaggregation: its requirements, SGLang's arguments, and its lease.

A prefill engine computes the KV cache of a prompt and its first token, and hands both to a decode engine, which
generates the rest. The router pairs engines; `pd_barrier.py` keeps pushes and pairs apart.
"""

import importlib
import importlib.util
import math
import urllib.request
from typing import Any

from penstock.config import NetworkConfig
from penstock.errors import InvalidRequestError, SetupError
from penstock.runtime.security import is_loopback
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang_plugin.variables import HOST_TRANSFER_VARIABLE, PAIR_DEADLINE_VARIABLE

ROLES = {
    "unified": common_pb2.REPLICA_ROLE_UNIFIED,
    "prefill": common_pb2.REPLICA_ROLE_PREFILL,
    "decode": common_pb2.REPLICA_ROLE_DECODE,
}

_FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""Stands in for a prefill engine's host: run without a peer (SGLang's constant of this name). No KV cache is
transferred, so the tokens are meaningless; they only show that the engine runs."""

_DEBIAN_PACKAGES = {"libibverbs.so": "libibverbs1", "libnuma.so": "libnuma1", "libcurl.so": "libcurl4"}
"""System libraries that the wheels need, and the Debian packages that contain them."""

_MAX_PORT = 65_535
_NUM_ROOMS = 1 << 62

_REGISTRATION_TIMEOUT_S = 10.0
_HEARTBEAT_S = 2
"""Seconds between a decode engine's health checks of its prefill engines; SGLang allows no fewer."""


def is_disaggregated(config: RolloutConfig) -> bool:
    """Return whether this engine has the prefill or the decode role of a PD pair."""
    return config.role != "unified"


def with_transfer_backend(config: RolloutConfig, *, cuda: bool) -> RolloutConfig:
    """Return the configuration with `auto` replaced by this machine's transfer backend."""
    if config.transfer_backend != "auto":
        return config
    return config.model_copy(update={"transfer_backend": "mooncake" if cuda else "nixl"})


def require_transfer_backend(config: RolloutConfig, *, cuda: bool) -> None:
    """Check, before a minute of loading, that the package that carries the KV cache is installed and loads.

    Raises:
        SetupError: naming what is missing and how to install it.
    """
    if not is_disaggregated(config):
        return
    if config.transfer_backend == "mooncake":
        remedy = (
            "pip install mooncake-transfer-engine-cuda13 (mooncake-transfer-engine for CUDA 12)"
            if cuda
            else "pip install mooncake-transfer-engine-non-cuda, or use nixl"
        )
        _require_module("mooncake", config, remedy)
        _require_import("mooncake.engine", config, remedy)
    else:
        remedy = "pip install 'penstock[disaggregation]'"
        _require_module("nixl", config, remedy)
        _require_import("nixl._api", config, remedy)


def _require_module(name: str, config: RolloutConfig, remedy: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise SetupError(
            f"rollout.role = {config.role!r} with rollout.transfer_backend = {config.transfer_backend!r} needs the "
            f"package {name}, which is not installed; {remedy}"
        )


def _require_import(name: str, config: RolloutConfig, remedy: str) -> None:
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:
        library = next((library for library in _DEBIAN_PACKAGES if library in str(error)), "")
        package = f"apt-get install {_DEBIAN_PACKAGES[library]}" if library else f"install it again ({remedy})"
        raise SetupError(
            f"rollout.transfer_backend = {config.transfer_backend!r}: {name} is installed but does not load: {error}; "
            f"{package}"
        ) from None


def environment(config: RolloutConfig, network: NetworkConfig, *, cuda: bool) -> dict[str, str]:
    """Return SGLang's environment variables for this role; set them before SGLang is imported."""
    if not is_disaggregated(config):
        return {}
    deadline = str(math.ceil(config.pair_deadline_s))
    variables = {
        # By default an engine waits five minutes for its peer.
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": deadline,
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": deadline,
        PAIR_DEADLINE_VARIABLE: deadline,
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(_HEARTBEAT_S),
    }
    if is_loopback(network.host):
        variables["SGLANG_HOST_IP"] = network.host  # by default KV goes through the network interface's address
    if not cuda:
        variables |= {
            HOST_TRANSFER_VARIABLE: config.transfer_backend,
            "MC_FORCE_TCP": "1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MC_LOG_LEVEL": "ERROR",
        }
    return variables


def server_args(config: RolloutConfig, network: NetworkConfig, *, bootstrap_port: int, cuda: bool) -> dict[str, Any]:
    """Return `sglang.Engine`'s arguments for this role; a prefill engine serves decode engines on `bootstrap_port`."""
    args: dict[str, Any] = {}
    if not is_disaggregated(config):
        return args
    args |= {
        "disaggregation_mode": config.role,
        "disaggregation_transfer_backend": config.transfer_backend,
        "host": network.host,
    }
    if config.role == "prefill":
        args["disaggregation_bootstrap_port"] = bootstrap_port
    elif not cuda:
        args["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return args


def describe(config: RolloutConfig, *, host: str, bootstrap_port: int) -> common_pb2.Disaggregation | None:
    """Return the role's part of the lease; None for a unified engine. `host` is this machine's address for others."""
    if not is_disaggregated(config):
        return None
    described = common_pb2.Disaggregation(
        transfer_backend=config.transfer_backend, tensor_parallel=config.tensor_parallel
    )
    if config.role == "prefill":
        described.bootstrap_host, described.bootstrap_port = host, bootstrap_port
    return described


def require_registered(listens_on: str, bootstrap_port: int) -> None:
    """Check that decode engines can find this prefill engine: SGLang ignores a failed registration.

    Raises:
        SetupError: the bootstrap server does not answer.
    """
    host = "127.0.0.1" if listens_on == "0.0.0.0" else listens_on
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    url = f"http://{host}:{bootstrap_port}/route?{query}"
    try:
        with urllib.request.urlopen(url, timeout=_REGISTRATION_TIMEOUT_S) as response:
            response.read()
    except OSError as error:
        raise SetupError(
            f"rollout.role = prefill: the engine's bootstrap server does not answer correctly at "
            f"{host}:{bootstrap_port} ({error}); is the port in use? SGLang's log above says more"
        ) from None


def alone(version: int) -> generate_pb2.Bootstrap:
    """Return the bootstrap of a health check, which the engine plays without a peer."""
    return generate_pb2.Bootstrap(host=_FAKE_BOOTSTRAP_HOST, policy_version=version)


def request_args(bootstrap: generate_pb2.Bootstrap | None) -> dict[str, Any]:
    """Return the pair's part of SGLang's request."""
    if bootstrap is None:
        return {}
    return {
        "bootstrap_host": bootstrap.host,
        "bootstrap_port": bootstrap.port or None,
        "bootstrap_room": bootstrap.room,
    }


def check_bootstrap(request: generate_pb2.GenerateRequest, *, disaggregated: bool) -> generate_pb2.Bootstrap | None:
    """Return the bootstrap through which the request's peers find each other; None for a unified engine.

    Raises:
        InvalidRequestError: bootstrap is missing, not allowed, or out of range.
    """
    if not request.HasField("bootstrap"):
        if disaggregated:
            raise InvalidRequestError(
                "bootstrap is missing: this engine is a peer of a PD pair (rollout.role = prefill or decode); send the "
                "request to a router, which pairs engines, or to a unified engine"
            )
        return None
    if not disaggregated:
        raise InvalidRequestError("bootstrap is set, but this engine is unified and plays requests alone; leave it out")
    bootstrap = request.bootstrap
    if not bootstrap.host or bootstrap.host == _FAKE_BOOTSTRAP_HOST:
        raise InvalidRequestError(f"bootstrap.host = {bootstrap.host!r} must be the host in the prefill engine's lease")
    if not 0 < bootstrap.port <= _MAX_PORT:
        raise InvalidRequestError(f"bootstrap.port = {bootstrap.port} must be the port in the prefill engine's lease")
    if not 0 < bootstrap.room < _NUM_ROOMS:
        raise InvalidRequestError(f"bootstrap.room = {bootstrap.room} must be a random number of 62 bits, and not 0")
    return bootstrap
