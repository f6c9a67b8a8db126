"""Continuous batching: which sequences run, and in which slot of the KV cache. Slots in use are the first ones."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

from distflow.engine.rollout.sequence import Sequence


class Scheduler:
    """`running[i]` is the sequence in slot i; `waiting` sequences get a slot in their order."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        self.slots, self.prefill_tokens = slots, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences by prompt, and prompts by length: those of one length are prefilled together."""
        first_seen: dict[tuple[int, ...], int] = {}

        def order(sequence: Sequence) -> tuple[int, int]:
            prompt = sequence.request.prompt
            return len(prompt), first_seen.setdefault(prompt, len(first_seen))

        self.waiting.extend(sorted(sequences, key=order))

    def admit(self) -> Iterator[list[list[Sequence]]]:
        """Gives free slots to waiting sequences; yields them in prefill batches, as lists that share a prompt.

        Prefill stalls decoding, so nothing is admitted before an eighth of the slots is free.
        """
        free = self.slots - len(self.running)
        if not self.waiting or free < min(len(self.waiting), max(1, self.slots // 8)):
            return
        admitted = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        for slot, sequence in enumerate(admitted, len(self.running)):
            sequence.slot = slot
        self.running += admitted
        batch: list[list[Sequence]] = []
        tokens = 0
        for prompt, group in groupby(admitted, key=lambda s: s.request.prompt):
            if batch and tokens + len(prompt) > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(list(group))
            tokens += len(prompt)
        yield batch

    def retire(self) -> tuple[list[Sequence], list[Sequence], list[int]]:
        """Removes finished sequences; those from the end take their slots.

        Returns the finished ones, those that change their slot, and the slots that their keys and values are in.
        """
        finished = [s for s in self.running if s.finished]
        if not finished:
            return [], [], []
        left = len(self.running) - len(finished)
        holes = [s.slot for s in self.running[:left] if s.finished]
        movers = [s for s in self.running[left:] if not s.finished]
        old_slots = [s.slot for s in movers]
        for slot, sequence in zip(holes, movers, strict=True):
            self.running[slot], sequence.slot = sequence, slot
        del self.running[left:]
        return finished, movers, old_slots
