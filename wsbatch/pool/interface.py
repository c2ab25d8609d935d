"""What a route needs of its pool."""

from typing import TYPE_CHECKING, Protocol

from wsbatch.errors import RequestError
from wsbatch.pool.replica import Kind, Replica

if TYPE_CHECKING:
    from wsbatch.pool.route import Route


class Pool(Protocol):
    """Finds replicas for routes, wakes them, and is told how they fare."""

    @property
    def max_unread_tokens(self) -> int:
        """Bound on what the client leaves unread."""
        ...

    def place(self, route: "Route") -> Replica | None:
        """The replica for it; None where none can take it now."""
        ...

    def has(self, kind: Kind) -> bool:
        """Whether there is a replica of this kind, or there was one that may come back."""
        ...

    def hold(self, route: "Route", *, retry_after_ms: int) -> None:
        """None can take it: `dispatch` it again when that has changed, but not before this time."""
        ...

    def refusal(self) -> RequestError | None:
        """Why a request made now would be refused."""
        ...

    def wake_at(self, route: "Route", at_s: float) -> None:
        """Call its `wake` then."""
        ...

    def moved(self, route: "Route") -> None:
        """It goes to another replica because of what happened on the one before."""
        ...

    def ended(self, route: "Route") -> None:
        """It has its terminal event, or was refused."""
        ...
