"""Where compiled kernels are kept: shared libraries, each under a name that holds the digest of its content.

A library is code that the next start runs, and a damaged one kills the process that maps it (SIGBUS, SIGSEGV). So it
appears under its name whole or not at all, is read and compared with its name before it is loaded, and is nobody's
but this user's or root's.
"""

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("wsbatch.model")


class KernelCache:
    """A directory of libraries.

    Args:
        directory: made where it is missing.

    Raises OSError where it cannot be made, PermissionError where somebody else could put a library into it.
    """

    def __init__(self, directory: Path) -> None:
        # No wider than this, whatever the umask: a group that may write is a group that may run code here.
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if (reason := _not_ours(directory.stat())) is not None:
            raise PermissionError(f"{directory} {reason}")
        self.directory = directory

    def find(self, key: str) -> Iterator[Path]:
        """The libraries under this key that are sound and nobody else's."""
        for path in sorted(self.directory.glob(f"step-{key}-*.so")):
            try:
                with path.open("rb") as file:
                    fault = _not_ours(os.fstat(file.fileno()))
                    if fault is None and path.name != _name(key, file.read()):
                        fault = "is damaged"
            except OSError as error:
                fault = f"cannot be read ({error.strerror})"
            if fault is None:
                yield path
            else:
                _log.warning("compiled kernels are not used: %s %s", path, fault)

    def keep(self, made: Path, key: str) -> Path:
        """Put a library in; its path there. Raises OSError where that is not possible, and leaves nothing then."""
        content = made.read_bytes()
        path = self.directory / _name(key, content)
        descriptor, partial = tempfile.mkstemp(dir=self.directory, suffix=".partial")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
        return path


def _name(key: str, content: bytes) -> str:
    return f"step-{key}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _not_ours(found: os.stat_result) -> str | None:
    """Why somebody else may have written it; None where only this user and root can."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, neither this one nor root"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w)"
    return None
