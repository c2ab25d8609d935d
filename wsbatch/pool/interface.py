"""What a route needs of its pool."""

from typing import TYPE_CHECKING, Protocol

from wsbatch.config import PoolConfig
from wsbatch.errors import RequestError
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.replica import Kind, Replica

if TYPE_CHECKING:
    from wsbatch.pool.route import Route


class Pool(Protocol):
    """Finds replicas for routes, wakes them, and is told how they fare."""

    @property
    def config(self) -> PoolConfig:
        """The bounds."""
        ...

    @property
    def clock(self) -> LoopClock:
        """Silences are measured on it."""
        ...

    def place(self, route: "Route") -> Replica | None:
        """The replica for it; None where none can take it now."""
        ...

    def fits_elsewhere(self, route: "Route") -> bool:
        """Whether there is a replica, not tried yet, whose limits take it."""
        ...

    def has(self, kind: Kind) -> bool:
        """Whether there is a replica of this kind, or there was one that may come back."""
        ...

    def hold(self, route: "Route") -> None:
        """None can take it: `dispatch` it again when that has changed, but not before its `not_before_s`."""
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
