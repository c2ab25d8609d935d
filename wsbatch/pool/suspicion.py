"""Is a request the cause of the losses it was there for? It is retried once; one that kills replicas must not go on."""

# A request that was running on two replicas when they were lost, and generated fewer tokens than this in between, is
# taken for the cause. One that only shared a replica with the cause has long gone past the place.
INNOCENT_TOKENS = 8
# The word of a request's start can be lost in the very crash that it causes: so many replicas may be lost with a
# request of which no start is known. Most of those only stood in the queue.
MAX_UNSTARTED_LOSSES = 3


class Suspicion:
    """The losses of replicas that one request was there for."""

    def __init__(self) -> None:
        self._lost_at: int | None = None  # output tokens there were when a replica was lost that ran it
        self._unstarted = 0

    def lost(self, *, started: bool, tokens: int) -> bool:
        """A replica was lost with it, running or not, after so many tokens of output. Whether it is the suspect."""
        if not started:
            self._unstarted += 1
            return self._unstarted >= MAX_UNSTARTED_LOSSES
        before, self._lost_at = self._lost_at, tokens
        return before is not None and tokens < before + INNOCENT_TOKENS
