"""Timing of calls that take turns, so that what disturbs a machine for a while disturbs all of them."""

import dataclasses
import statistics
import time

MOST_TURNS = 30
PATIENCE = 30.0  # seconds that a case waits for quiet turns


@dataclasses.dataclass(frozen=True)
class Turns:
    """`repeats` turns of each call, and further ones until they took `least_seconds` in all. clock: wall or cpu. quiet: a
    machine.Quiet; turns that begin or end while the machine is disturbed do not count. threads: of the calls."""

    clock: str
    repeats: int
    least_seconds: float = 0.0
    quiet: object = None
    threads: int = 1

    def take(self, calls):
        """Seconds of each turn of each call; of all turns where too few were quiet."""
        now = time.process_time if self.clock == "cpu" else time.perf_counter
        taken, counted = [], []
        begin = time.perf_counter()
        was_quiet = self.quiet is None or self.quiet.now(self.threads)
        while not self._enough(len(taken), len(counted), time.perf_counter() - begin):
            times = [0.0] * len(calls)
            order = range(len(calls)) if len(taken) % 2 == 0 else reversed(range(len(calls)))
            for i in order:
                start = now()
                calls[i]()
                times[i] = now() - start
            taken.append(times)
            is_quiet = self.quiet is None or self.quiet.now(self.threads)
            if was_quiet and is_quiet:
                counted.append(times)
            was_quiet = is_quiet
        if self.quiet is not None:
            self.quiet.turns += len(taken)
            self.quiet.disturbed_turns += len(taken) - len(counted)
            self.quiet.disturbed_cases += len(counted) < self.repeats
        return [list(times) for times in zip(*(counted if len(counted) >= self.repeats else taken))]

    def _enough(self, taken, counted, seconds):
        if counted < self.repeats:
            return self.quiet is not None and taken >= self.repeats and seconds > PATIENCE
        return counted >= MOST_TURNS or seconds >= self.least_seconds

    def times(self, *calls, clock=None):
        """Seconds of each turn of each call, after one to warm up."""
        for call in calls:
            call()
        return dataclasses.replace(self, clock=clock or self.clock).take(calls)

    def medians(self, *calls, clock=None):
        """Seconds of each call."""
        return [statistics.median(times) for times in self.times(*calls, clock=clock)]
