"""`wsbatch serve` with its event loop watched: python watched_server.py FILE [FLAG …]; see `attack.py`."""

import mmap
import struct
import sys
import time
from functools import partial

import trio

from wsbatch.cli import main


class Holds(trio.abc.Instrument):
    """Writes the longest time between two waits of the event loop to a file: seconds, and CPU seconds of its thread."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 16)
        self._since_s = self._cpu_s = 0.0

    def after_io_wait(self, timeout: float) -> None:
        """The loop has what its sockets and deadlines bring."""
        self._since_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        """It is done with that."""
        held_s = time.perf_counter() - self._since_s
        if self._since_s and held_s > struct.unpack("dd", self._shared[:])[0]:
            self._shared[:] = struct.pack("dd", held_s, time.thread_time() - self._cpu_s)


if __name__ == "__main__":
    trio.run = partial(trio.run, instruments=[Holds(sys.argv[1])])  # type: ignore[assignment]
    sys.exit(main(["serve", *sys.argv[2:]]))
