"""Lets a browser in: the token in the page's address becomes a cookie, and the cookie the header that servers ask for.

So pages, pictures and data need the token as every other HTTP server of Penstock does, and it does not stay in the
address, where it would be seen over a shoulder or copied into an issue.
"""

from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class SignIn:
    """An application around another one that asks for a bearer token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        token = next((value for key, value in query if key == "token"), "")
        name = _cookie_name(scope)
        if token:
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            response = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), status_code=303)
            response.set_cookie(name, token, httponly=True, samesite="strict", secure=scope["scheme"] == "https")
            await response(scope, receive, send)
            return
        known = _cookie(scope, name)
        if known and not any(key == b"authorization" for key, _ in scope["headers"]):
            headers = [*scope["headers"], (b"authorization", f"Bearer {known}".encode("latin-1", "replace"))]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _cookie_name(scope: Scope) -> str:
    """Return a name of its own for each port, because browsers send a host's cookies to all of its ports."""
    server = scope.get("server")
    return f"penstock_view_{server[1] if server else 0}"


def _cookie(scope: Scope, name: str) -> str:
    for key, value in scope["headers"]:
        if key == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(name)
            except CookieError:
                continue
            if found is not None:
                return found.value
    return ""
