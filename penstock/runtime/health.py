"""Reports whether a server is ready, as an exit code: `python3 -m penstock.runtime.health HOST:PORT`.

Containers run this every few seconds, so it imports gRPC and nothing else that is large. It calls grpc.health.v1, which
needs no token, and ignores the environment's proxies.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_OPTIONS = (("grpc.enable_http_proxy", 0),)


def health_of(
    address: str, *, timeout_s: float, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> str:
    """Return the status of the server at `address` (host:port): SERVING, NOT_SERVING, or the gRPC code of the failure.

    Args:
        address: The server.
        timeout_s: Deadline of the call, including connecting.
        credentials: For a server with TLS; None: plain text.
        server_name: The name in its certificate; empty: the host of the address.
    """
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", server_name)) if server_name else _OPTIONS
    with (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    ) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the status; return 0 if it is SERVING, else 1."""
    parser = argparse.ArgumentParser(
        prog="python3 -m penstock.runtime.health", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout-s", type=float, default=8.0)
    parser.add_argument("--tls-ca", type=Path, help="the authority that the server is checked against; switches TLS on")
    parser.add_argument("--tls-cert", type=Path, help="for servers that want one of their callers, too")
    parser.add_argument("--tls-key", type=Path, help="the key of that certificate")
    parser.add_argument("--tls-server-name", default="", help="the name that the server's certificate holds")
    given = parser.parse_args(arguments)
    if (given.tls_cert is None) != (given.tls_key is None):
        parser.error("--tls-cert and --tls-key go together; give both or neither")
    if given.tls_cert is not None and given.tls_ca is None:
        parser.error("--tls-cert needs --tls-ca, which switches TLS on; give the authority of the server's certificate")
    if given.tls_server_name and given.tls_ca is None:
        parser.error("--tls-server-name needs --tls-ca, which switches TLS on; give the authority of the certificate")
    credentials = None
    if given.tls_ca is not None:
        try:
            root, key, certificate = (
                None if path is None else path.read_bytes() for path in (given.tls_ca, given.tls_key, given.tls_cert)
            )
        except OSError as error:
            parser.error(f"{error.filename} cannot be read: {error.strerror}; give the path of a PEM file")
        credentials = grpc.ssl_channel_credentials(root, key, certificate)
    status = health_of(
        given.address, timeout_s=given.timeout_s, credentials=credentials, server_name=given.tls_server_name
    )
    sys.stdout.write(f"{status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
