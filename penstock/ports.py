"""Whether a port can be listened on, asked before something slow or foreign is to do it."""

import socket

from penstock.errors import SetupError


def require_free_port(host: str, port: int, *, key: str) -> None:
    """See that `port` can be listened on; 0, which takes any, always can.

    Raises:
        SetupError: it cannot; `key` is the setting to change.
    """
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another port") from None
