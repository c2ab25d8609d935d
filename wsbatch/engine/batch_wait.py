"""A clock that runs only while a batching policy waits for more requests although the model is free."""


class BatchWaitClock:
    """Seconds of such waiting so far; `now_s` is the caller's clock."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._since_s: float | None = None

    def __repr__(self) -> str:
        return f"<BatchWaitClock {self._waited_s:g} s{'' if self._since_s is None else ', running'}>"

    def start(self, now_s: float) -> None:
        """The policy waits from now on."""
        self._since_s = now_s

    def stop(self, now_s: float) -> None:
        """It waits no more. Does nothing where it did not."""
        self._waited_s, self._since_s = self.reading_s(now_s), None

    def reading_s(self, now_s: float) -> float:
        """What the clock shows."""
        return self._waited_s + (0.0 if self._since_s is None else now_s - self._since_s)
