"""How many reads of one drive are in flight. Pure: time, bytes and waits are arguments.

It begins with few, and twice as many are tried while the readers wait for the drive most of the
time. They stay if the drive gives a quarter more: where an answer takes long, as from a network's
drive, each read takes as long as before, and where the drive is busy twice as long. What the drive
gives is told by how long reads take, not by what lands: other work on the processors changes that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The most reads in flight, of all drives together.
MOST_READS = 16
#: What more reads have to multiply the drive's rate by.
FASTER = 1.25
#: A rate is measured over so long, and as many reads as are in flight, at least so many.
WINDOW_S, WINDOW_READS = 0.1, 4


@dataclass(slots=True, eq=False)
class ReadDepth:
    """The readers of one drive. `now_s` are readings of one monotonic clock.

    `depth` reads are to be in flight. `running` readers there are; each reads one span at a time.
    """

    depth: int
    most: int
    began_s: float
    running: int = field(init=False)
    _before: int = 0  # the depth before the one that is being tried; 0: none is
    _bytes_per_s: float = 0.0  # what the drive gave with that
    _pause: int = 0
    _next_pause: int = 8  # windows, after a try that was not faster; then twice as many
    _old: int = 0  # reads in flight that began with another depth
    _waited_s: float = 0.0
    _per_byte_s: list[float] = field(default_factory=list)  # of each read

    def __post_init__(self) -> None:
        self.running = self.depth

    def landed(self, nbytes: int, waited_s: float, now_s: float) -> int:
        """Record that a reader has read and stored a span.

        Args:
            nbytes: The span's bytes.
            waited_s: How long the read itself took.
            now_s: The time.

        Returns:
            How many readers go on in place of this one: 0 if there are too many, else 1 or more.
        """
        if self._old:
            self._old -= 1
            if not self._old:
                self._measure(now_s)
        else:
            self._per_byte_s.append(waited_s / max(nbytes, 1))
            self._waited_s += waited_s
            passed_s = now_s - self.began_s
            if len(self._per_byte_s) >= max(self.depth, WINDOW_READS) and passed_s >= WINDOW_S:
                self._look(passed_s)
                self._measure(now_s)
        more = self.depth - self.running
        self.running += max(more, -1)
        return 1 + max(more, -1)

    def _measure(self, now_s: float) -> None:
        self.began_s, self._waited_s = now_s, 0.0
        self._per_byte_s.clear()

    def _look(self, passed_s: float) -> None:
        # The slower ones have waited for a processor, too.
        quick_s = sorted(self._per_byte_s)[len(self._per_byte_s) // 4]
        bytes_per_s = self.depth / max(quick_s, 1e-12)
        if self._before and bytes_per_s < FASTER * self._bytes_per_s:
            self._step(self._before)
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
            self._before = 0
        elif self._pause:
            self._pause -= 1
        elif self.depth < self.most and 2 * self._waited_s >= self.depth * passed_s:
            self._before, self._bytes_per_s = self.depth, bytes_per_s
            self._step(min(2 * self.depth, self.most))
        else:
            self._before = 0

    def _step(self, depth: int) -> None:
        self._old, self.depth = self.running, depth
