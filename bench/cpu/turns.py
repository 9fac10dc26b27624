"""Timing of calls that take turns, so that what disturbs a machine for a while disturbs all of them."""

import dataclasses
import statistics
import time

MOST_TURNS = 30


@dataclasses.dataclass(frozen=True)
class Turns:
    """`repeats` turns of each call, and further ones until they took `least_seconds` in all. clock: wall or cpu."""

    clock: str
    repeats: int
    least_seconds: float = 0.0

    def take(self, calls):
        """Seconds of each turn of each call."""
        now = time.process_time if self.clock == "cpu" else time.perf_counter
        times = [[] for _ in calls]
        begin, turn = time.perf_counter(), 0
        while turn < self.repeats or (turn < MOST_TURNS and time.perf_counter() - begin < self.least_seconds):
            order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
            for i in order:
                start = now()
                calls[i]()
                times[i].append(now() - start)
            turn += 1
        return times

    def medians(self, *calls, clock=None):
        """Seconds of each call, after one to warm up."""
        for call in calls:
            call()
        return [statistics.median(times) for times in dataclasses.replace(self, clock=clock or self.clock).take(calls)]
