"""Pages of the KV cache: which are free, and how many of them must stay free so that every sequence gets its pages."""

from distflow.rollout.builtin.sequence import Sequence


class PagePool:
    """Gives pages to sequences as they grow.

    A sequence claims what it needs beyond the pages of its history, which it has from the beginning. The oldest running
    sequence that claims any may always have all that it can ever need: others get a page only if enough are left for
    it, and wait otherwise. So it finishes, and what it held is enough for the next oldest. One that claims none never
    waits; what it leaves in its history was never the pool's. Nothing is computed twice, and which pages a sequence
    has depends on the order of the requests only.
    """

    def __init__(self, pages: int, page: int) -> None:
        self.pages, self.page = pages, page
        self._free = list(range(pages - 1, -1, -1))  # the last one freed is taken first: its memory was used before
        self._reserve = 0  # the largest possible claim of a sequence admitted since none was running

    def need(self, length: int) -> int:
        """Returns the pages that a sequence of this length has."""
        return -(-length // self.page)

    def most(self, sequence: Sequence) -> int:
        """Returns how many pages a sequence can ever claim."""
        return max(0, self.need(sequence.max_length) - sequence.history_pages)

    def admit(self, sequence: Sequence, oldest: Sequence | None) -> bool:
        """Gives a new sequence the pages of its prompt; False: it has to wait for others to finish."""
        most = self.most(sequence)
        wanted = max(0, self.need(len(sequence.request.prompt)) - sequence.history_pages)
        if oldest is None:
            assert most <= self.pages
            self._reserve = most
        elif len(self._free) - wanted + _claimed(oldest) < max(most, self._reserve):
            return False
        self._reserve = max(most, self._reserve)
        sequence.pages = list(sequence.history.pages) if sequence.history else []
        self._take(sequence, wanted)
        return True

    def grow(self, sequence: Sequence, oldest: Sequence | None) -> bool:
        """Makes sure that there is a place for the newest token of a sequence; False: it has to wait."""
        if sequence.length <= len(sequence.pages) * self.page:
            return True
        assert oldest is not None  # the sequence claims a page
        if sequence is not oldest and len(self._free) - 1 + _claimed(oldest) < self._reserve:
            return False
        self._take(sequence, 1)
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes back what a sequence had claimed."""
        self._free += reversed(sequence.pages[sequence.history_pages :])
        sequence.pages = []

    def _take(self, sequence: Sequence, count: int) -> None:
        sequence.pages += [self._free.pop() for _ in range(count)]


def _claimed(sequence: Sequence) -> int:
    return len(sequence.pages) - sequence.history_pages
