"""`wsbatch serve` with its event loop watched: python watched_server.py FILE [FLAG …]; see `attack.py`."""

import mmap
import struct
import sys
import time
from functools import partial

import trio

from wsbatch.cli import main


class Holds(trio.abc.Instrument):
    """Writes to a file how long the event loop went without a wait, at most: in seconds, and in CPU seconds of its
    thread, which other processes do not lengthen."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 16)
        self._since_s = self._cpu_s = 0.0

    def after_io_wait(self, timeout: float) -> None:
        """The loop has what its sockets and deadlines bring."""
        self._since_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        """It is done with that."""
        if self._since_s:
            longest_s, longest_cpu_s = struct.unpack("dd", self._shared[:])
            held_s, cpu_s = time.perf_counter() - self._since_s, time.thread_time() - self._cpu_s
            if held_s > longest_s or cpu_s > longest_cpu_s:
                self._shared[:] = struct.pack("dd", max(held_s, longest_s), max(cpu_s, longest_cpu_s))


if __name__ == "__main__":
    trio.run = partial(trio.run, instruments=[Holds(sys.argv[1])])  # type: ignore[assignment]
    sys.exit(main(["serve", *sys.argv[2:]]))
