"""Access control: the tokens that servers require, and TLS.

Every server, client and connection takes a `Security`; the default is `Security.from_environment`.

Invariants: a process whose environment has a token neither serves nor calls without it; a token is in the environment
and in memory, never in a recipe, a log or the text of an error.
"""

import contextlib
import ctypes
import hmac
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from penstock.config import SecurityConfig
from penstock.errors import ConfigError

log = structlog.get_logger()

TOKEN = "PENSTOCK_TOKEN"
"""Environment variable with the token of gRPC and HTTP."""
NATS_TOKEN = "PENSTOCK_NATS_TOKEN"
"""Environment variable with the token of NATS; by default the token of gRPC and HTTP."""
CONTROL_TOKEN = "PENSTOCK_CONTROL_TOKEN"
"""Environment variable with the token of calls that can change the policy; by default the token of NATS."""
REMOTE_TOKEN = "PENSTOCK_REMOTE_TOKEN"
"""Environment variable with the token that profile `remote` sends to its service, which may be a third party's."""
ENVIRONMENT_TOKEN = "PENSTOCK_ENVIRONMENT_TOKEN"
"""Environment variable with the token that workers send to environment servers, which may be a third party's."""
VARIABLES = tuple(
    f"{name}{suffix}"
    for name in (TOKEN, NATS_TOKEN, CONTROL_TOKEN, REMOTE_TOKEN, ENVIRONMENT_TOKEN)
    for suffix in ("", "_FILE")
)
"""All variables that lead to a secret."""

REFUSAL = f"token missing or wrong; set {TOKEN}"
"""The refusal of a caller without the token, whatever it asked for."""
CONTROL_REFUSAL = f"control token missing or wrong; set {CONTROL_TOKEN}, or {NATS_TOKEN} where both are the same"
"""The refusal of a caller that has the common token, but not the control token."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
"""The characters of a bearer token (RFC 6750)."""
_SCHEME = b"bearer "
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates as of the start of the process: paths and contents of the same files."""

    certificate_file: Path | None
    key_file: Path | None
    ca_file: Path | None
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    server_name: str
    """The name in the certificates of servers; empty: the host name that a client connects to."""
    mutual: bool
    """Whether a server accepts only callers with a certificate of that authority."""

    def require_certificate(self) -> None:
        """Check that a server can be started.

        Raises:
            ConfigError: there is no certificate for servers.
        """
        if self.certificate is None:
            raise ConfigError(
                f"security.tls_ca = {str(self.ca_file)!r} switches TLS on, but security.tls_cert is not set; a server "
                "needs a certificate of its own: give security.tls_cert and security.tls_key"
            )

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context: the authorities it trusts, and its own certificate."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.certificate_file is not None:
            context.load_cert_chain(self.certificate_file, self.key_file)
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The tokens and TLS that servers require and clients send. Without arguments: none."""

    token: str = field(default="", repr=False)
    """Token of gRPC and HTTP; empty: none is required."""
    nats_token: str = field(default="", repr=False)
    """Token of NATS; empty: none."""
    control_token: str = field(default="", repr=False)
    """Token of calls that can change the policy (`penstock.rpc.access`); empty: none is required."""
    tls: Tls | None = None
    """None: connections are plain text."""

    @classmethod
    def load(cls, config: SecurityConfig, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the tokens from the environment and the certificates from their files.

        Raises:
            ConfigError: a file cannot be read or has the wrong content, or a token cannot be sent.
        """
        token = read_secret(TOKEN, environment)
        nats_token = read_secret(NATS_TOKEN, environment) or token
        control_token = read_secret(CONTROL_TOKEN, environment) or nats_token
        return cls(token=token, nats_token=nats_token, control_token=control_token, tls=_read_tls(config))

    @classmethod
    def from_environment(cls) -> Self:
        """Return the tokens of the environment, without TLS: enough for a client in a script.

        Raises:
            ConfigError: a token cannot be read or sent.
        """
        return cls.load(SecurityConfig())

    def tell_if_open(self, host: str, address: str, *, secret: str = TOKEN) -> None:
        """Warn if a server at `address`, listening on `host`, admits callers from other machines without a token.

        `secret` is the variable of the token that the server requires: TOKEN or NATS_TOKEN.
        """
        token = self.nats_token if secret == NATS_TOKEN else self.token
        is_closed = bool(token) or (self.tls is not None and self.tls.mutual)
        if not is_closed and not is_loopback(host):
            log.warning("server.left_open", address=address, remedy=f"set {secret}, or keep the network private")

    def admits(self, authorization: bytes, *, key_name: str = "") -> bool:
        """Return whether a caller with this `authorization` (header or metadata; empty if there is none) has the token,
        or the key `key_name`.
        """
        return shows(authorization, self.token) or (bool(key_name) and shows(authorization, self.key_of(key_name)))

    def key_of(self, name: str) -> str:
        """Return a key that opens the resource called `name` and nothing else; empty if no token is required.

        It is derived from the token, which cannot be derived from it, so the key can be given to third-party code.
        """
        if not self.token:
            return ""
        return hmac.digest(self.token.encode(), f"penstock key of {name}".encode(), "sha256").hex()


def shows(authorization: bytes, token: str) -> bool:
    """Return whether `authorization` is `Bearer` with this token, or no token is required (empty).

    Takes constant time, however much of the token is right.
    """
    if not token:
        return True
    scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
    return scheme.lower() == _SCHEME and hmac.compare_digest(given.strip(), token.encode())


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def hide_secrets(environment: Mapping[str, str] = os.environ) -> None:
    """Close this process's environment and memory to others of the same user, if `environment` leads to a secret.

    Not for a process whose files others open under /proc, as an engine does with the weights of its trainer: the kernel
    closes those, too. It holds for forks, and ends when a process executes another program. Without it a verifier could
    read its server's token in /proc.
    """
    if any(environment.get(name) for name in VARIABLES):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def read_secret(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token in variable `name`, or in the file that `name`_FILE names; empty if neither is set.

    Raises:
        ConfigError: both are set, the file cannot be read or is empty, or the token has characters that cannot be sent.
    """
    token, file = environment.get(name, ""), environment.get(f"{name}_FILE", "")
    if token and file:
        raise ConfigError(f"{name} and {name}_FILE are both set; unset one of them")
    if file:
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"{name}_FILE = {file!r} cannot be read: {reason}; name a file with the token") from None
        if not token:
            raise ConfigError(f"{name}_FILE = {file!r} is empty; write the token into it")
    if token and not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{name} has characters that a token cannot have; use letters, digits and . _ ~ + / = - only, for example "
            "what `openssl rand -hex 32` prints"
        )
    return token


def _read_tls(config: SecurityConfig) -> Tls | None:
    if config.tls_cert is None and config.tls_ca is None:
        return None
    tls = Tls(
        certificate_file=config.tls_cert,
        key_file=config.tls_key,
        ca_file=config.tls_ca,
        certificate=_read("tls_cert", config.tls_cert),
        key=_read("tls_key", config.tls_key),
        ca=_read("tls_ca", config.tls_ca),
        server_name=config.tls_server_name,
        mutual=config.mutual,
    )
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if config.tls_cert is not None:
        try:
            trial.load_cert_chain(config.tls_cert, config.tls_key, password="")  # else it would ask on the terminal
        except (ssl.SSLError, OSError):
            raise ConfigError(
                f"security.tls_cert = {str(config.tls_cert)!r} and security.tls_key = {str(config.tls_key)!r} are no "
                "certificate and its key; give PEM files that belong together, the key without a passphrase"
            ) from None
    if config.tls_ca is not None:
        with contextlib.suppress(ssl.SSLError, OSError):
            trial.load_verify_locations(config.tls_ca)
        if not trial.cert_store_stats()["x509"]:
            raise ConfigError(
                f"security.tls_ca = {str(config.tls_ca)!r} holds no certificate of an authority; give a PEM file"
            )
    return tls


def _read(field_name: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.{field_name} = {str(path)!r} cannot be read: {error.strerror}; give the path of a PEM file"
        ) from None
