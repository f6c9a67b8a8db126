"""Continuous batching: which sequences run, and in which pages of the KV cache their keys and values are."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from distflow.rollout.builtin.history import HistoryPages
from distflow.rollout.builtin.page_pool import PagePool
from distflow.rollout.builtin.sequence import Sequence
from distflow.util.arrays import Ints


class Scheduler:
    """Admits sequences from `waiting` to `running` in their order, at most `slots`, as the pool has pages."""

    def __init__(
        self, slots: int, prefill_tokens: int, pool: PagePool, history_pages: HistoryPages | None = None
    ) -> None:
        self.slots, self.prefill_tokens, self.pool = slots, prefill_tokens, pool
        self.history_pages = history_pages or HistoryPages()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.in_pieces: deque[list[Sequence]] = deque()  # of `running`: long prompts, and who shares them
        self._tables: Ints = np.zeros((slots, 1), np.int64)  # row i: the pages of running[i]
        self._admitted = 0
        self._room = 0  # decoding steps in which no sequence needs a page

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences by priority, prompts by length, as equal lengths are prefilled together."""
        first_seen: dict[Any, int] = {}

        def order(sequence: Sequence) -> tuple[int, int, int]:
            prompt = sequence.request.prompt
            return (
                sequence.request.priority,
                len(prompt),
                first_seen.setdefault(sequence.request.shared, len(first_seen)),
            )

        self.waiting.extend(sorted(sequences, key=order))

    def admit(self) -> Iterator[list[list[Sequence]]]:
        """Starts waiting sequences; yields them in prefill batches, as lists that share a prompt.

        Requests that continue a history are in batches of their own, each in a list of its own. Prefill stalls
        decoding, so nothing is admitted before an eighth of the slots is free.
        """
        if not self.waiting:
            return
        for sequence in [s for s in list(self.waiting) if s.aborted]:  # a list at once: others may join it meanwhile
            self.waiting.remove(sequence)
        self.retire()  # aborted ones
        free = self.slots - len(self.running)
        if not self.waiting or free < min(len(self.waiting), max(1, self.slots // 8)):
            return
        admitted: list[Sequence] = []
        oldest = self._oldest()
        while len(admitted) < free and self.waiting:
            sequence = self.waiting[0]
            if not self._find_history(sequence) or not self.pool.admit(sequence, oldest):
                break
            self.waiting.popleft()
            if sequence.history:
                sequence.history.busy = True
            if self.pool.most(sequence):
                oldest = oldest or sequence
            sequence.prefilled = sequence.reused
            sequence.slot, sequence.order, self._admitted = len(self.running), self._admitted, self._admitted + 1
            self.running.append(sequence)
            self._enter(sequence, 0)
            self._room = 0
            admitted.append(sequence)
        fresh = [s for s in admitted if not s.reused]
        yield from self._batches([list(group) for _, group in groupby(fresh, key=lambda s: s.request.shared)])
        yield from self._batches([[s] for s in admitted if s.reused])

    def is_long(self, prompts: list[list[Sequence]]) -> bool:
        """Returns whether a prefill batch is one prompt that should be computed in pieces."""
        first = prompts[0][0]
        return len(first.request.prompt) - first.reused > self.prefill_tokens

    def next_piece(self) -> tuple[list[Sequence], int] | None:
        """Returns a long prompt's sequences, and how far to compute it in the next pass."""
        while self.in_pieces:
            self.in_pieces[0] = [s for s in self.in_pieces[0] if not s.aborted]
            if sequences := self.in_pieces[0]:
                end = min(sequences[0].prefilled + self.prefill_tokens, len(sequences[0].request.prompt))
                if end == len(sequences[0].request.prompt):
                    self.in_pieces.popleft()
                return sequences, end
            self.in_pieces.popleft()
        return None

    def _find_history(self, sequence: Sequence) -> bool:
        """Finds what the sequence's history has of its prompt; False: it has to wait for a share of the pages.

        A sequence whose history another one runs in does without it.
        """
        history = sequence.history
        if history is None:
            return True
        if history.busy or history.closed or not self.history_pages.each:
            sequence.history, sequence.reused = None, 0
            return True
        if not self.history_pages.give(history):
            return False
        sequence.reused = history.shared_with(sequence.request.prompt, sequence.places)
        return True

    def _batches(self, prompts: list[list[Sequence]]) -> Iterator[list[list[Sequence]]]:
        batch: list[list[Sequence]] = []
        tokens = 0
        for sequences in prompts:
            new = len(sequences[0].request.prompt) - sequences[0].reused
            if batch and tokens + new > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(sequences)
            tokens += new
        if batch:
            yield batch

    def ready(self) -> tuple[list[Sequence], Ints]:
        """Returns the sequences whose next token has a place, and their pages; the others wait for a page, or for
        pieces of their prompt."""
        if self._room > 0 and not self.in_pieces:
            self._room -= 1
            return self.running, self._tables[: len(self.running)]
        oldest = self._oldest()
        for s in self.running:
            if self._room_of(s) < 0 and self.pool.grow(s, oldest):
                self._enter(s, len(s.pages) - 1)
        self._room = min(map(self._room_of, self.running))
        rows = [s.slot for s in self.running if s.tokens and self._room_of(s) >= 0]
        return [self.running[i] for i in rows], self._tables[rows]

    def _room_of(self, sequence: Sequence) -> int:
        """Returns how many further tokens a sequence has a place for; negative: not even for the newest."""
        return len(sequence.pages) * self.pool.page - sequence.length

    def retire(self) -> list[Sequence]:
        """Removes finished sequences and frees their pages; those from the end take their places."""
        finished = [s for s in self.running if s.finished]
        if not finished:
            return []
        left = len(self.running) - len(finished)
        holes = [s.slot for s in self.running[:left] if s.finished]
        movers = [s for s in self.running[left:] if not s.finished]
        for slot, sequence in zip(holes, movers, strict=True):
            self._tables[slot] = self._tables[sequence.slot]
            self.running[slot], sequence.slot = sequence, slot
        del self.running[left:]
        for sequence in finished:
            self.pool.release(sequence)
            sequence.leave_history(self.pool.page)
        return finished

    def _oldest(self) -> Sequence | None:
        """Returns the one that the pool has to be enough for."""
        return min(filter(self.pool.most, self.running), key=lambda s: s.order, default=None)

    def _enter(self, sequence: Sequence, first: int) -> None:
        """Enters the pages of a running sequence from the `first` on into its row."""
        if len(sequence.pages) > self._tables.shape[1]:
            wider = np.zeros((self.slots, 2 * len(sequence.pages)), np.int64)
            wider[:, : self._tables.shape[1]] = self._tables
            self._tables = wider
        self._tables[sequence.slot, first : len(sequence.pages)] = sequence.pages[first:]
