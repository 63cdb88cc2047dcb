"""Lets a browser in: the token in the page's address becomes a cookie, and the cookie the header that servers ask for.

So pages, pictures and data need the token as every other HTTP server of Penstock does, and the token does not stay in
the address, where it would be seen over a shoulder or copied into an issue. A program that opens a browser gets the
address as an argument, which all users of the machine may read. So that address has a key in place of the token, which
lets in one browser.
"""

import secrets
from collections.abc import Sequence
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class SignIn:
    """An application around another one that asks for a bearer token."""

    def __init__(self, app: ASGIApp, *, token: str = "", key: str = "") -> None:
        """Serve `app`; the first browser that shows `key`, if that is given, gets `token`."""
        self._app = app
        self._token = token
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode("latin-1").split("&")
        token = _parameter(query, "token") or self._redeemed(_parameter(query, "key"))
        name = _cookie_name(scope)
        if token:
            rest = "&".join(pair for pair in query if not pair.startswith(("token=", "key=")))
            path = "/" + scope["path"].lstrip("/\\")  # two slashes would begin the name of another host
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), status_code=303)
            # Lax: whoever is signed in can follow a link to a page from a chat. Routes only read, and no site may frame
            # them. No header can carry what latin-1 lacks, so the server finds such a token wrong, whatever is left of
            # it.
            value = token.encode("latin-1", "replace").decode("latin-1")
            response.set_cookie(name, value, httponly=True, samesite="lax", secure=scope["scheme"] == "https")
            await response(scope, receive, send)
            return
        known = _cookie(scope, name)
        if known and not any(key == b"authorization" for key, _ in scope["headers"]):
            headers = [*scope["headers"], (b"authorization", f"Bearer {known}".encode("latin-1", "replace"))]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)

    def _redeemed(self, key: str) -> str:
        """Return the token for the key, which is then used up; empty if it is not the key."""
        if not self._key or not secrets.compare_digest(key.encode(), self._key.encode()):
            return ""
        self._key = ""
        return self._token


def _parameter(query: Sequence[str], name: str) -> str:
    """Return the value of a parameter, empty if there is none; a plus is a plus there, as in many tokens."""
    return next((unquote(pair.removeprefix(f"{name}=")) for pair in query if pair.startswith(f"{name}=")), "")


def _cookie_name(scope: Scope) -> str:
    """Return a name of its own for each port, because browsers send a host's cookies to all of its ports.

    The browser's port is another one than the server's where `ssh -L 7091:127.0.0.1:7090` forwards it; both count.
    """
    _, _, asked = Headers(scope=scope).get("host", "").rpartition(":")
    server = scope.get("server")
    return f"penstock_view_{asked if asked.isdecimal() else ''}_{server[1] if server else ''}"


def _cookie(scope: Scope, name: str) -> str:
    for key, value in scope["headers"]:
        if key == b"cookie":
            # SimpleCookie drops all cookies if it cannot read one, and another program's may be anything.
            found = cookie_parser(value.decode("latin-1")).get(name)
            if found is not None:
                return found
    return ""
