"""The sections of a recipe that several services share."""

import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import pydantic

from penstock import shipped
from penstock.config.base import Config
from penstock.config.nats_url import address_of, fault_of, with_scheme
from penstock.config.paths import EXPANDED, UNSET_IF_EMPTY, OptionalPath, UserPath
from penstock.errors import ConfigError
from penstock.model import hub

MAX_NAME_CHARS: Final = 128
"""Of a run's name: the names in NATS that are made from it have limits of their own."""


class RunConfig(Config):
    """The run's name, seed and files."""

    name: str = pydantic.Field(default="run", pattern=r"^[A-Za-z0-9_-]+$", max_length=MAX_NAME_CHARS)
    """Name of the run: at most 128 letters, digits, '_' and '-'. It is also the prefix of all names that the run uses
    in NATS."""
    dir: UserPath = Path("runs")
    """Parent of the run's own folder."""
    folder: OptionalPath = None
    """The run's own folder. Unset: `penstock train` makes <dir>/<name>-<start>; `penstock serve` uses <dir>/<name>."""
    seed: int = pydantic.Field(default=0, ge=0, le=2**63 - 1)
    """Seed of all random choices outside the engines."""
    grace_s: float = pydantic.Field(default=5.0, ge=0)
    """Seconds that running work (calls, turns, groups) may still take when a process stops. The rest is handed to other
    processes or put back. The trainer has no limit: it finishes its step, the push and the checkpoint."""


class NetworkConfig(Config):
    """Addresses on which a process's services listen and others reach them. Each service's section has its port.

    Hosts are names or IPv4 addresses: what Penstock writes as host:port is read by gRPC, NATS, torch and SGLang, which
    do not agree on brackets.
    """

    host: str = "127.0.0.1"
    """Address on which every service of the process listens; 0.0.0.0 for all."""
    advertise_host: str = ""
    """Name or address under which others reach this process: engines in their lease, the trainer for the process group
    of a broadcast. Empty: `host`, or this machine's name if that is 0.0.0.0."""

    @property
    def advertised(self) -> str:
        """The name or address to give to others."""
        return self.advertise_host or (socket.gethostname() if self._listens_on_all else self.host)

    @property
    def local(self) -> str:
        """The address at which this machine itself reaches the process."""
        return "127.0.0.1" if self._listens_on_all else self.host

    @property
    def _listens_on_all(self) -> bool:
        return self.host in ("", "0.0.0.0")

    @pydantic.field_validator("host", "advertise_host")
    @classmethod
    def _is_no_ipv6_address(cls, host: str) -> str:
        if ":" in host:
            raise ValueError("must be a name or an IPv4 address, without a port; IPv6 addresses are not supported")
        return host


class TraceConfig(Config):
    """Spans of what each process does when, in the run folder, for the timeline of `penstock view`."""

    max_gib: float = pydantic.Field(default=2.0, ge=0)
    """Size of the spans in the folder `trace`; above it, the oldest are deleted. 0 records none."""


class BusConfig(Config):
    """NATS servers, and how long they wait for other processes."""

    url: str = ""
    """NATS server, for example nats://127.0.0.1:4222; several servers of one cluster with commas between them. Empty:
    `penstock train` starts its own."""
    replicas: Literal[1, 3, 5] = 1
    """Servers of the cluster that store each stream and bucket. With 3, the run goes on while one of them is away; with
    5, while two are. All processes of a run must have the same number."""
    lease_ttl_s: float = pydantic.Field(default=5.0, ge=1.0)
    """Seconds after which an unrenewed lease lapses, and its replica or trainer counts as dead; others notice up to two
    seconds later. Leases are renewed three times as often. Raise it, in all processes of the run, for many hundreds of
    engines, or for a network that is away for seconds."""
    ack_wait_s: float = pydantic.Field(default=10.0, ge=1.0)
    """A worker that has not reported progress for this many seconds loses its prompt group to another worker."""

    @pydantic.model_validator(mode="after")
    def _names_servers(self) -> Self:
        # Validate the whole section, and first, so that no message shows the URL.
        if "@" in self.url:
            raise ValueError("url holds a secret, which would be written to the run folder; set PENSTOCK_NATS_TOKEN")
        for server in self.servers:
            if fault := fault_of(server):
                raise ValueError(f"url names {server!r}: {fault}; write nats://host:port")
        if self.replicas > 1 and not self.url:
            raise ValueError(
                f"replicas = {self.replicas} needs url, the servers of a NATS cluster; the server that "
                "`penstock train` starts is a single one"
            )
        return self

    @property
    def servers(self) -> list[str]:
        """The URLs in `url`, without blanks, each with its scheme."""
        return [with_scheme(server) for part in self.url.split(",") if (server := part.strip())]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each server."""
        return [address_of(server) for server in self.servers]

    @property
    def is_cluster(self) -> bool:
        """Whether there is another server to go to when one does not answer."""
        return self.replicas > 1 or len(self.servers) > 1


class SecurityConfig(Config):
    """TLS for every gRPC, HTTP and NATS connection. Tokens are not settings: they come from the environment only."""

    # No OptionalPath: a variable that is not set must not switch TLS off.
    tls_cert: UserPath | None = None
    """This process's certificate, followed by its intermediates (PEM). Setting it or tls_ca switches TLS on."""
    tls_key: UserPath | None = None
    """The certificate's key (PEM, without a passphrase)."""
    tls_ca: UserPath | None = None
    """Certificates of the authorities that sign servers, and with `mutual` clients (PEM). Unset: the public ones."""
    tls_server_name: str = ""
    """The name in every server's certificate, for hosts whose names no certificate can know beforehand, such as scaled
    containers. Empty: a certificate must hold the name under which its server is reached."""
    mutual: bool = False
    """Servers also require a client certificate signed by tls_ca."""

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_key", "tls_cert") if self.tls_cert is None else ("tls_cert", "tls_key")
            raise ValueError(f"{given} is given and {missing} is not; a certificate and its key go together")
        if self.mutual and (self.tls_cert is None or self.tls_ca is None):
            raise ValueError("mutual = true needs tls_cert, tls_key and tls_ca; give all three")
        if self.tls_server_name and self.tls_ca is None:
            raise ValueError(
                f"tls_server_name = {self.tls_server_name!r} needs tls_ca, the authority that signs for the name; "
                "give both or neither"
            )
        return self


def _find_model(given: Any) -> Any:
    return str(shipped.find_model(given)) if isinstance(given, str) else given  # JSON has no paths


def _name_model(folder: Path) -> str:
    return hub.name_snapshot(folder) or shipped.name_model(folder)


ModelPath = Annotated[
    Path,
    pydantic.BeforeValidator(_find_model),  # after the next
    EXPANDED,
    pydantic.PlainSerializer(_name_model, return_type=str, when_used="json"),
]
"""Path of a model folder, or `owner/name[@revision]` of a model on the Hugging Face Hub, which `hub.fetch` replaces by
its folder. In a file, Penstock's own models are `builtin:NAME` and a folder of the Hub's cache is `owner/name@commit`:
every installation understands them."""


class ModelConfig(Config):
    """The model that is trained."""

    path: ModelPath
    """Folder with the checkpoint, tokenizer, processor and chat template, in the layout of transformers; or a model on
    the Hugging Face Hub, `owner/name` or `owner/name@revision`, whose commit a run's config.toml has; or
    `builtin:tiny-qwen3-vl`, the tiny model that comes with Penstock."""


class SamplingConfig(Config):
    """How the policy is sampled. The trainer computes its log-probabilities at the same temperature."""

    temperature: float = pydantic.Field(default=1.0, gt=0, le=100)
    """Divides the logits. Greedy decoding (0) has no log-probabilities that a policy gradient could use."""
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution. Training rejects less: the trainer assumes 1."""
    top_k: int = pydantic.Field(default=-1, ge=-1)
    """Sample from this many of the likeliest tokens; -1: from all. Training rejects anything else."""
    max_new_tokens: int = pydantic.Field(default=512, ge=1)
    """Largest number of tokens in one turn."""

    def require_trainable(self) -> None:
        """Reject a distribution that the trainer cannot reproduce.

        Engines report log-probabilities before top_p and top_k cut the distribution, as the trainer computes them.
        With a cut, tokens are drawn with other probabilities, and every importance ratio would be wrong.

        Raises:
            ConfigError: top_p or top_k cuts the distribution.
        """
        if self.top_p < 1:
            raise ConfigError(f"sampling.top_p = {self.top_p} cannot be trained on; set 1 (all of the distribution)")
        if self.top_k > 0:
            raise ConfigError(f"sampling.top_k = {self.top_k} cannot be trained on; set -1 (all of the distribution)")


class MetricsConfig(Config):
    """What Prometheus scrapes."""

    port: Annotated[int | None, pydantic.Field(ge=0, le=65535), UNSET_IF_EMPTY] = None
    """Port on which each process serves its metrics over HTTP, at /metrics; unset or empty: none does. 0 takes any free
    one; `penstock train` needs that, and its processes name their ports in the folder `prometheus` beside the run's."""


class LogConfig(Config):
    """Level and format of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe events that are logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON otherwise."""
