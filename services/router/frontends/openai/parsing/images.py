"""Images as requests bring them: inside the URL.

An http(s) URL is refused: callers could make this server fetch from networks that they cannot reach themselves.
"""

import base64
import binascii
import re

from services.router.frontends.openai.errors import ParameterError

_DATA_URL = re.compile(r"data:(?:image/(?:png|jpeg|jpg|webp|gif|None))?((?:;[^;,]*)*),", re.IGNORECASE)
"""Published data sets have URLs of the type `image/None`; the engine looks at the file itself in any case."""


def read_image(url: str, *, param: str, max_bytes: int) -> bytes:
    """Return the file that a data: URL holds.

    Raises:
        ParameterError: it is another URL, not base64, or larger than `max_bytes`.
    """
    if url[:5].lower() != "data:":
        raise ParameterError(
            param, f"{param} = {url[:40]!r}: images are accepted as data: URLs only; send data:image/png;base64,..."
        )
    head = _DATA_URL.match(url)
    if head is None or not head[1].lower().endswith(";base64"):
        raise ParameterError(
            param, f"{param} = {url[:40]!r}...: send data:image/png;base64,..., or jpeg, webp or gif for png"
        )
    text = url[head.end() :]
    if len(text) > 4 * (max_bytes // 3 + 1):
        raise ParameterError(param, f"{param} is larger than {max_bytes} bytes; send a smaller one")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParameterError(param, f"{param} is not base64: {error}") from None
    if not data:
        raise ParameterError(param, f"{param} holds no bytes; send the image's file")
    return data
