"""Files that this process may open: as many as the connections that it is to hold need."""

import logging
from contextlib import suppress

LOG = logging.getLogger("wsbatch.cli")

# Besides connections: listeners, the event loop's own, the model's files and libraries while they load.
OTHER_DESCRIPTORS = 256


def allow_connections(max_connections: int) -> None:
    """Raise the soft limit of open files to what twice `max_connections` sockets need; never lower it.

    Twice, because what has not said yet what it wants is bounded by that. Where the hard limit, which is the system's
    to set, is too low for it, the log says so.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return
    needed = 2 * max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # macOS has one more limit, which it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        soft = max(soft, allowed)
    if soft < needed:
        LOG.warning(
            "max_connections %d can need %d open files and this process may have %d: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE=)",
            max_connections,
            needed,
            soft,
        )
