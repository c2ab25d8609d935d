"""What happened to one request, in seconds from the run's start, and where its time went."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan

from wsbatch.messages import BatchReport, SamplingParams, Timing
from wsbatch_bench.sampling import GREEDY

_MESSAGE = 200  # characters of it
TTFT_PARTS = ("client_lag", "network", "queue", "batch_wait", "prefill")


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        index: its place in the schedule.
        prompt_tokens, output_tokens: as asked for.
        scheduled_s: when it was to be sent; latencies count from here.
        sent_s: when it was sent.
        arrivals: (time, tokens) of each frame that carried tokens.
        ended_s: when its terminal frame came; infinite while it has not.
        error: the code of what ended it instead of an answer; `message` says it in words, where there are any.
        unreached: whether it failed before any server took it: no connection, or an address that serves no such thing.
        reported_tokens: output tokens by the server's own count.
        cached_tokens: prompt tokens that the server took from its prefix cache, as far as it says.
        sizes_told: whether each frame's number of tokens is known; otherwise only their sum is, spread evenly.
        timing, batch: what the server said of it; None from servers that do not say.
        priority: its class, 0 the most urgent.
        sampling: how its tokens are chosen.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float = nan
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float = inf
    error: str | None = None
    message: str = ""
    unreached: bool = False
    reported_tokens: int | None = None
    cached_tokens: int = 0
    sizes_told: bool = True
    timing: Timing | None = None
    batch: BatchReport | None = None
    priority: int = 0
    sampling: SamplingParams = GREEDY

    @property
    def tokens(self) -> int:
        """Output tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def ok(self) -> bool:
        """Whether it was answered, whole."""
        return self.error is None and self.ended_s < inf

    @property
    def lag_s(self) -> float:
        """How late this client sent it."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """Scheduled to first token; infinite where the request failed."""
        return self.arrivals[0][0] - self.scheduled_s if self.ok and self.arrivals else inf

    @property
    def e2e_s(self) -> float:
        """Scheduled to last token; infinite where the request failed."""
        return self.arrivals[-1][0] - self.scheduled_s if self.ok and self.arrivals else inf

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens after those of the first frame; infinite where the request failed.

        It is undefined, nan, where no token comes after the first frame: in an answer of one token, in one that came in
        one piece, and in a failure that asked for one token only.
        """
        if not self.ok or not self.arrivals:
            return inf if self.output_tokens > 1 else nan
        after = self.tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / after if after else nan

    @property
    def gaps_s(self) -> list[float]:
        """Times between frames of tokens (ITL); tokens of one frame have none between them."""
        times = [at_s for at_s, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    def failed(self, error: str, now_s: float, message: str = "", *, unreached: bool = False) -> None:
        """It ended without an answer."""
        self.error, self.unreached = error, unreached
        self.message = " ".join(message.split())[:_MESSAGE]  # perhaps a page of HTML
        self.ended_s = now_s

    def ttft_parts_s(self) -> dict[str, float] | None:
        """Where the time to the first token went; the parts sum to `ttft_s`. None where the server did not say.

        `queue` is time behind running batches, `batch_wait` the time that the policy held the request although the
        model was free, `network` what is left between the client's clock and the server's, both ways.
        """
        if self.timing is None or not self.ok or not self.arrivals:
            return None
        batch_wait_s = self.timing.batch_wait_ms / 1000
        return {
            "client_lag": self.lag_s,
            "network": self.ttft_s - self.lag_s - self.timing.ttft_ms / 1000,
            "queue": self.timing.queue_ms / 1000 - batch_wait_s,
            "batch_wait": batch_wait_s,
            "prefill": self.timing.ttft_ms / 1000 - self.timing.queue_ms / 1000,
        }
