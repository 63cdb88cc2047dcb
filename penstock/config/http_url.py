"""Checks URLs of HTTP servers, without calling them."""

from urllib.parse import urlsplit


def is_http_url(url: str) -> bool:
    """Return whether a client can call `url`: http or https, with a host, no white space and, if it names a port, one
    from 1 to 65535."""
    if any(each.isspace() for each in url):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, or a port that is no such number
        return False
