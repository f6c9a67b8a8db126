"""Generates with a model whose weights are in place: queues requests, sizes the KV cache, runs the continuous batch."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from distflow.engine.cpu.lanes import Lanes, lane_count, threads_of_a_lane
from distflow.engine.rollout.batch import ContinuousBatch
from distflow.engine.rollout.engine import Completion, Request
from distflow.engine.rollout.forward import Forward, forward_for
from distflow.engine.rollout.kv_cache import KVCache
from distflow.engine.rollout.model_runner import Agree, ModelRunner
from distflow.engine.rollout.page_pool import PagePool
from distflow.engine.rollout.scheduler import Scheduler
from distflow.engine.rollout.sequence import Sequence
from distflow.errors import ConfigError
from distflow.plan.units import human_bytes

PAGE = 256  # tokens of a page of the KV cache, unless all sequences are shorter
# Prompt tokens in one prefill pass. On a CPU, the activations of this many stay in its cache.
_PREFILL_TOKENS, _PREFILL_TOKENS_CPU = 8192, 1024


@dataclass(frozen=True)
class CacheLimits:
    """Limits of what runs at once: bytes of KV cache, bytes per token, and a plain maximum of sequences."""

    bytes_per_token: int
    cache_bytes: int
    max_sequences: int

    def fits(self, page: int, length: int) -> bool:
        """Whether a sequence of this length fits in pages of so many tokens."""
        return -(-length // page) * page * self.bytes_per_token <= self.cache_bytes

    def pages(self, page: int, length: int) -> int:
        """The number of pages of so many tokens; raises if a sequence of this length does not fit in them."""
        if not self.fits(page, length):
            raise ConfigError(
                f"rollout.kv_cache_gb: a sequence of {length} tokens needs"
                f" {human_bytes(self.bytes_per_token * -(-length // page) * page)} of KV cache and there are"
                f" {human_bytes(self.cache_bytes)}; raise it, or lower rollout.max_tokens"
            )
        return self.cache_bytes // (self.bytes_per_token * page)


class Running(Protocol):
    """The part that exists while requests are unfinished: a continuous batch, or several of them in threads."""

    @property
    def has_unfinished(self) -> bool: ...

    def add(self, sequences: list[Sequence]) -> None: ...

    def step(self) -> list[Sequence]: ...


class Generator:
    """`max_lanes`: continuous batches that may run at once, each in a thread of its own; see `cpu.lanes`."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: CacheLimits,
        device: torch.device,
        agree: Agree = lambda tokens: tokens,
        max_lanes: int = 1,
    ) -> None:
        self.model, self.limits, self.device, self.agree, self.max_lanes = model, limits, device, agree, max_lanes
        self.caches: list[KVCache] = []  # one per lane, kept from rollout to rollout
        self._queue: list[Sequence] = []
        self._running: Running | None = None  # while requests are unfinished
        self._cleanup = ExitStack()  # unpacks the weights, ends the threads

    def add_request(self, request: Request) -> None:
        self._queue.append(Sequence(request))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._queue or self._running)

    def step(self, weight_version: int = 0) -> list[Completion]:
        """Generates until at least one request is finished and returns all that are."""
        if not self.has_unfinished:
            return []
        try:
            if self._running is None:
                self._running = self._start(self._queue)
            longest = self.caches[0].longest
            self._running.add([s for s in self._queue if s.max_length <= longest])
            self._queue = [s for s in self._queue if s.max_length > longest]  # until a lane has a larger share
            finished = self._running.step()
        except BaseException:
            self.stop()
            raise
        if not self._running.has_unfinished:
            self._end()
        return [s.completion(weight_version) for s in finished]

    def interrupt(self, weight_version: int = 0) -> list[Completion]:
        """Drops unfinished requests; returns what there is of their responses."""
        running = self._running
        assert running is None or isinstance(running, ContinuousBatch)  # lanes are not in step with each other
        unfinished = [*(running.unfinished if running else ()), *self._queue]
        self.stop()
        return [s.completion(weight_version) for s in unfinished]

    def stop(self) -> None:
        """Drops unfinished requests."""
        self._queue = []
        self._end()

    def _end(self) -> None:
        self._running = None
        self._cleanup.close()

    def _start(self, sequences: list[Sequence]) -> Running:
        longest = max(s.max_length for s in sequences)
        page = self._page(longest)
        pages, need, slots = self.limits.pages(page, longest), -(-longest // page), self.limits.max_sequences
        lanes = lane_count(self.model, min(self.max_lanes, slots, pages // need), len(sequences))
        slots //= lanes
        self._allocate(lanes, min(pages // lanes, slots * need), page)
        with threads_of_a_lane(lanes):
            forward = forward_for(self.model)
        self._cleanup.enter_context(forward.packed_weights())
        batches = [self._batch(forward, cache, slots) for cache in self.caches]
        return batches[0] if lanes == 1 else self._cleanup.enter_context(Lanes(batches))

    def _page(self, longest: int) -> int:
        """Returns the size of pages: those that there are, if they are large enough and not too large."""
        kept, page = self.caches[0].page if self.caches else 0, min(PAGE, longest)
        return kept if kept > page and self.limits.fits(kept, longest) else page

    def _allocate(self, lanes: int, pages: int, page: int) -> None:
        caches = self.caches
        if len(caches) != lanes or (caches[0].page, pages) != (page, min(pages, caches[0].pages)):
            self.caches = caches = []  # frees the old ones before there are new ones
            self.caches = [KVCache(pages, page) for _ in range(lanes)]

    def _batch(self, forward: Forward, cache: KVCache, slots: int) -> ContinuousBatch:
        budget = _PREFILL_TOKENS_CPU if self.device.type == "cpu" else _PREFILL_TOKENS
        runner = ModelRunner(forward, cache, self.agree, self.device)
        return ContinuousBatch(Scheduler(slots, budget, PagePool(cache.pages, cache.page)), runner)
