"""The auth token: how it is written, and how it is kept out of what is shown."""

from urllib.parse import urlsplit


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
