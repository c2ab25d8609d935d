"""The browser page: the files of `clients/web`, which the wheel has as `wsbatch/web`, under names that are fixed here.

No path of a client's ever reaches the file system: it is looked up in a table, made once.
"""

import hashlib
from functools import cache
from pathlib import Path

from wsbatch.server.http import Answer, Head

_ROOT = Path(__file__).parent.parent / "web"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ts": "text/plain; charset=utf-8",
}
FILES = (
    "index.html",
    "page.css",
    "page.js",
    "answer.js",
    "batch.js",
    "timeline.js",
    "link.js",
    "pane.js",
    "sampling.js",
    "wsbatch.js",
    "wsbatch.d.ts",
    "errors.js",
    "generation.js",
    "request.js",
    "icon.svg",
)

# The page may talk to any server (`?url=`), and to nothing else; nobody may put it in a frame. Its own address can
# hold a token, which no other site is told.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self' ws: wss: http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Access-Control-Allow-Origin", "*"),  # they are public, and a page elsewhere may import the module from here
    # Asked for anew each time, but sent only where it has changed: page and server must be of one version.
    ("Cache-Control", "no-cache"),
)


@cache
def _files() -> dict[str, Answer]:
    answers = {}
    for name in FILES:
        path = _ROOT / name
        body = path.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        answers[f"/{name}"] = Answer(200, body, _TYPES[path.suffix], (*_HEADERS, ("ETag", tag)))
    answers["/"] = answers["/index.html"]
    return answers


def page_answer(head: Head) -> Answer | None:
    """The file that is asked for, or 304 where the client has it already; None for a path that is no file's."""
    answer = _files().get(head.path)
    if answer is None:
        return None
    if head.method not in (b"GET", b"HEAD"):
        return Answer(405, b"GET or HEAD\n", headers=(("Allow", "GET, HEAD"),))
    tag = dict(answer.headers)["ETag"]
    if any(tag in value.decode("latin-1") for value in head.values(b"if-none-match")):
        return Answer(304, b"", answer.content_type, answer.headers)
    return answer
