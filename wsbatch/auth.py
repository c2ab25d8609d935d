"""Who may come in: the auth token, and the origins of browser pages (RFC 6454, section 6), each in its one form."""

import re
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def clean_token(token: str, *, name: str) -> str:
    """The token without the white space around it: files that hold secrets end in a newline.

    Raises ValueError, with `name` and never the token, for one that is empty or cannot be sent in an HTTP header.
    """
    cleaned = token.strip()
    if not cleaned:  # it would let everybody in
        raise ValueError(f"{name} is empty: must have at least one character, or not be given")
    if not cleaned.isprintable():
        raise ValueError(f"{name} must not have control characters within it")
    return cleaned


def without_secrets(url: str) -> str:
    """The URL as it may be shown and logged: without user, password and query, any of which may hold a token."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be read"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def clean_origin(text: str) -> str:
    """The origin as a browser sends it: lower case, without its scheme's own port and without a closing slash.

    `null` (a page from a file) stands for itself. Raises ValueError, saying what an origin is, for anything else.
    """
    origin = text.strip().lower()
    if origin == "null":
        return origin
    scheme, separator, _ = origin.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise ValueError(f"{text!r} has no scheme: an origin is https://host or https://host:port")
    if scheme in ("ws", "wss"):
        raise ValueError(f"{text!r} is the address of a server: an origin is that of the page, https://host")
    if "*" in origin:
        raise ValueError(f"{text!r} has a `*`, which is no part of an origin: name each one, or give `*` alone for all")
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port
        host = f"[{host}]" if ":" in host else host.encode("idna").decode() if not host.isascii() else host
    except ValueError as error:  # UnicodeError is one
        raise ValueError(f"{text!r} is no origin: {error}") from error
    if not host or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} must be a scheme, a host and perhaps a port: https://host:port, nothing more")
    if port is None or port == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{port}"


def clean_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Each in its one form; empty for `*` alone, which lets every page in. Raises ValueError."""
    if [origin.strip() for origin in origins] == ["*"]:
        return ()
    return tuple(dict.fromkeys(clean_origin(origin) for origin in origins))
