"""Continuous batching: which sequences run, and in which pages of the KV cache their keys and values are."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from distflow.data.balance import Ints
from distflow.engine.rollout.page_pool import PagePool
from distflow.engine.rollout.sequence import Sequence


class Scheduler:
    """`running` has at most `slots` sequences, those that `wait` join it in their order, as the pool has pages."""

    def __init__(self, slots: int, prefill_tokens: int, pool: PagePool) -> None:
        self.slots, self.prefill_tokens, self.pool = slots, prefill_tokens, pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._tables: Ints = np.zeros((slots, 1), np.int64)  # row i: the pages of running[i]
        self._admitted = 0
        self._room = 0  # decoding steps in which no sequence needs a page

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences by priority, prompts by length: those of one length are prefilled together."""
        first_seen: dict[tuple[int, ...], int] = {}

        def order(sequence: Sequence) -> tuple[int, int, int]:
            prompt = sequence.request.prompt
            return sequence.request.priority, len(prompt), first_seen.setdefault(prompt, len(first_seen))

        self.waiting.extend(sorted(sequences, key=order))

    def admit(self) -> Iterator[list[list[Sequence]]]:
        """Starts waiting sequences; yields them in prefill batches, as lists that share a prompt.

        Prefill stalls decoding, so nothing is admitted before an eighth of the slots is free.
        """
        for sequence in [s for s in self.waiting if s.aborted]:
            self.waiting.remove(sequence)
        free = self.slots - len(self.running)
        if not self.waiting or free < min(len(self.waiting), max(1, self.slots // 8)):
            return
        admitted: list[Sequence] = []
        oldest = self._oldest()
        while len(admitted) < free and self.waiting and self.pool.admit(self.waiting[0], oldest):
            sequence = self.waiting.popleft()
            oldest = oldest or sequence
            sequence.slot, sequence.order, self._admitted = len(self.running), self._admitted, self._admitted + 1
            self.running.append(sequence)
            self._enter(sequence, 0)
            self._room = 0
            admitted.append(sequence)
        batch: list[list[Sequence]] = []
        tokens = 0
        for prompt, group in groupby(admitted, key=lambda s: s.request.prompt):
            if batch and tokens + len(prompt) > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(list(group))
            tokens += len(prompt)
        if batch:
            yield batch

    def ready(self) -> tuple[list[Sequence], Ints]:
        """Returns the sequences whose next token has a place, and their pages; the others wait for a page."""
        if self._room > 0:
            self._room -= 1
            return self.running, self._tables[: len(self.running)]
        oldest = self._oldest()
        assert oldest is not None
        for s in self.running:
            if self._room_of(s) < 0 and self.pool.grow(s, oldest):
                self._enter(s, len(s.pages) - 1)
        self._room = min(map(self._room_of, self.running))
        rows = [s.slot for s in self.running if self._room_of(s) >= 0]
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
        return finished

    def _oldest(self) -> Sequence | None:
        return min(self.running, key=lambda s: s.order, default=None)

    def _enter(self, sequence: Sequence, first: int) -> None:
        """Enters the pages of a running sequence from the `first` on into its row."""
        if len(sequence.pages) > self._tables.shape[1]:
            wider = np.zeros((self.slots, 2 * len(sequence.pages)), np.int64)
            wider[:, : self._tables.shape[1]] = self._tables
            self._tables = wider
        self._tables[sequence.slot, first : len(sequence.pages)] = sequence.pages[first:]
