"""Histories: KV pages kept between the turns of a conversation, so that a turn computes only what is new."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distflow.model.images import Place


@dataclass(eq=False)
class History:
    """KV pages kept between the turns of a conversation; used by one sequence at a time."""

    pages: list[int] = field(default_factory=list)  # its own from its first sequence to its end
    tokens: Sequence[int] = ()  # whose keys and values are in the pages, from the first position on
    images: Sequence[Place] = ()  # of the prompt of its last sequence
    batch: int = -1  # the index of the batch that has the pages
    busy: bool = False  # a sequence runs in it
    closed: bool = False  # no request continues it

    def shared_with(self, prompt: Sequence[int], images: Sequence[Place] = ()) -> int:
        """Returns how many tokens of a prompt need not be computed; its last one always is, for its logits.

        An image is computed as a whole, and tokens that stand for another one are others.
        """
        same = min(len(self.tokens), len(prompt) - 1)
        if tuple(prompt[:same]) != tuple(self.tokens[:same]):
            same = next(i for i in range(same) if prompt[i] != self.tokens[i])
        return min([same, *(p.start for p in images if p.start < same and (p.end > same or p not in self.images))])

    def reset(self) -> None:
        """Forgets its pages: the cache is gone."""
        self.pages, self.tokens, self.images, self.batch, self.busy = [], (), (), -1, False


class HistoryPages:
    """The part of a cache that is set aside for histories: an equal share for each of so many, by their number alone.

    So whether a token is computed again depends on its conversation only, never on time or on others. What a sequence
    needs beyond its history's share it takes from the pool, and gives back.
    """

    def __init__(self, first: int = 0, count: int = 0, each: int = 0) -> None:
        self.each = each
        starts = range(first + (count - 1) * each, first - 1, -each) if each else ()
        self._free = [list(range(start, start + each)) for start in starts]
        self._open: list[History] = []

    def give(self, history: History) -> bool:
        """Makes sure that a history has its share; False: a closed one has it, whose last sequence has yet to leave."""
        if history.pages:
            return True
        for closed in [h for h in self._open if h.closed and not h.busy]:
            self._free.append(closed.pages)
            self._open.remove(closed)
        if not self._free:
            return False
        history.pages = self._free.pop()
        self._open.append(history)
        return True


def history_share(pages: int, need: int, histories: int) -> int:
    """Returns how many pages each history has, in a cache in which a sequence of any length, `need`, fits beside them.

    All that they can need, if there is room; else they have half of the cache, and the beginning of each is kept.
    """
    if (histories + 1) * need <= pages:
        return need
    return pages // 2 // histories if pages - pages // 2 >= need else 0
