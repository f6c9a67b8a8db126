"""Which weights each step generates with, and when a step is over: the one place where a run counts versions."""

from distflow.plan.staleness import weight_version


class Versions:
    """The steps of a run and the versions of its weights: version v is what v steps of training have made.

    The run trains the steps after `first` until `last`, with rollouts that are `delay` steps behind. All workers and
    both threads of each agree on it without talking, but for `stop_step`, which the vote of a step decides.
    """

    def __init__(self, delay: int = 0, first: int = 0, last: int = 0) -> None:
        self.delay, self.first, self.last = delay, first, last
        self.stop_step: int | None = None  # after which the run ends early, as some worker was asked to

    def of(self, step: int) -> int:
        """Returns the version that a step generates with."""
        return weight_version(step, self.delay, self.first)

    def is_used(self, version: int) -> bool:
        """Returns whether a step generates with a version."""
        return version == self.first or version + self.delay < self.last

    @property
    def begins(self) -> range:
        """Yields the steps to begin, then one more number for each step that ends after the last one has begun."""
        return range(self.first + 1, self.last + self.delay + 2)

    def ended_before(self, step: int) -> int | None:
        """Returns the step that ends when `step` begins, whose weights `step` generates with; None in the beginning."""
        ended = step - self.delay - 1
        return ended if ended > self.first else None

    def stop_after(self, step: int) -> None:
        """Ends the run after the steps that ranks ahead have begun. Only the first vote counts."""
        if self.stop_step is None:
            self.stop_step = step + self.delay
