"""Generates with a model whose weights are in place: queues requests, sizes the KV cache, runs the continuous batch."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from distflow.cpu import torch_threads
from distflow.cpu.threaded_batches import ThreadedBatches, share_threads
from distflow.errors import ConfigError
from distflow.model.experts import experts_blocks
from distflow.model.images import Images
from distflow.rollout.builtin import device_cache
from distflow.rollout.builtin.continuous_batch import Agree, ContinuousBatch
from distflow.rollout.builtin.decoding_graphs import DecodingGraphs, can_record
from distflow.rollout.builtin.device_cache import DeviceCache
from distflow.rollout.builtin.forward import forward_for
from distflow.rollout.builtin.history import History, HistoryPages, history_share
from distflow.rollout.builtin.kv_cache import KVCache
from distflow.rollout.builtin.llama_forward import LlamaForward
from distflow.rollout.builtin.page_pool import PagePool
from distflow.rollout.builtin.panel_cache import PanelCache, has_panels
from distflow.rollout.builtin.scheduler import Scheduler
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.builtin.vision import Vision
from distflow.rollout.engine import Completion, Request, Wake, never
from distflow.util.text import human_bytes

PAGE = device_cache.PAGE  # tokens of a page of the KV cache; on a CPU fewer, if all sequences are shorter
# Prompt tokens in one prefill pass. On a CPU, the activations of this many stay in its cache.
_PREFILL_TOKENS, _PREFILL_TOKENS_CPU = 8192, 1024


@dataclass(frozen=True)
class CacheLimits:
    """Limits of what runs at once: bytes of KV cache, bytes per token, and a plain maximum of sequences."""

    bytes_per_token: int
    cache_bytes: int
    max_sequences: int

    @property
    def longest(self) -> int:
        """Returns the length of the longest sequence that fits: in whole pages, if there is room for one."""
        tokens = self.cache_bytes // self.bytes_per_token
        return tokens - tokens % PAGE if tokens > PAGE else tokens

    def fits(self, page: int, length: int) -> bool:
        """Returns whether a sequence of this length fits in pages of so many tokens."""
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


class Generator:
    """Takes requests and returns completions; a KV cache and batches exist while there is something to generate.

    `max_batches` may run at once, each in a thread of its own; see `cpu.threaded_batches`.
    """

    interruptible: ClassVar[bool] = True

    def __init__(
        self,
        model: PreTrainedModel,
        limits: CacheLimits,
        device: torch.device,
        agree: Agree = lambda tokens: tokens,
        max_batches: int = 1,
        keeps_experts: bool = False,
        images: Images | None = None,
        graphs: bool = False,
    ) -> None:
        self.model, self.limits, self.device, self.agree, self.max_batches = model, limits, device, agree, max_batches
        self.keeps_experts = keeps_experts  # in completions
        self.graphs = graphs and can_record(device) and not images  # of decoding steps
        self.vision = Vision(model, images, device) if images else None
        self.weight_version = 0  # that completions tell
        self.caches: list[KVCache] = []  # one per batch, kept from rollout to rollout
        self._queue: list[Sequence] = []
        self._unfinished: dict[int, Sequence] = {}  # by the id of the request
        self._longest = 0  # sequence that there is room for in each of them
        self._histories: dict[int, History] = {}  # by sample id, while they may be continued
        self._serving: tuple[int, int] | None = None  # sequences to be ready for, and the longest of them
        self._running: ContinuousBatch | ThreadedBatches | None = None  # while requests are unfinished, or may come
        self._cleanup = ExitStack()  # unpacks the weights, ends the threads

    def add_request(self, request: Request) -> None:
        sequence = self._unfinished[request.id] = Sequence(request, self._history(request))
        if self.vision:
            sequence.places = self.vision.images.places(request.prompt, request.images)
        self._queue.append(sequence)

    def _history(self, request: Request) -> History | None:
        """Returns where a request leaves its keys and values; None: nowhere."""
        if not request.keep or not self._serving:
            return None
        if request.sample_id not in self._histories and len(self._histories) < self._serving[0]:
            self._histories[request.sample_id] = History()
        return self._histories.get(request.sample_id)

    def forget(self, sample_ids: Iterable[int]) -> None:
        """Gives the pages of samples back; to others, when the last sequences of these have left."""
        for sample_id in sample_ids:
            if history := self._histories.pop(sample_id, None):
                history.closed = True

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drops requests; running ones leave the batch after its next decoding step."""
        for sequence in [self._unfinished.pop(i) for i in request_ids if i in self._unfinished]:
            sequence.aborted = True
        self._queue = [s for s in self._queue if not s.aborted]

    @contextmanager
    def serving(self, sequences: int, longest: int) -> Iterator[None]:
        """Keeps weights packed and threads running inside of it, also while there are no requests."""
        self._serving = sequences, longest
        try:
            yield
        finally:
            self._serving, self._histories = None, {}
            self.stop()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def step(self, wake: Wake = never) -> list[Completion]:
        """Generates until at least one request is finished, or `wake` is true, and returns all that are finished."""
        if not self.has_unfinished:
            return []
        try:
            if self._running and not self._running.has_unfinished and self._too_long():
                self._end()  # and start again, with room for it
            if self._running is None:
                self._running = self._start(self._queue)
            self._running.add([s for s in self._queue if s.max_length <= self._longest])
            self._queue = [s for s in self._queue if s.max_length > self._longest]  # until a batch has a larger share
            finished = self._running.step(wake)
        except BaseException:
            self.stop()
            raise
        for sequence in finished:
            self._unfinished.pop(sequence.request.id, None)  # one that was aborted meanwhile is not there any more
        if not self._running.has_unfinished and not self._serving:
            self._end()
        finished = [s for s in finished if not s.aborted]
        return [s.completion(self.weight_version) for s in finished]

    def interrupt(self) -> list[Completion]:
        """Drops unfinished requests; returns what there is of their responses."""
        running = self._running
        assert running is None or isinstance(running, ContinuousBatch)  # several are not in step with each other
        unfinished = [*(running.unfinished if running else ()), *self._queue]
        self.stop()
        return [s.completion(self.weight_version) for s in unfinished]

    def stop(self) -> None:
        """Drops unfinished requests."""
        self._queue, self._unfinished = [], {}
        self._end()

    def _too_long(self) -> bool:
        """Returns whether the waiting requests have no room in the caches."""
        return all(s.max_length > self._longest for s in self._queue)

    def _end(self) -> None:
        self._running = None
        self._cleanup.close()
        for history in self._histories.values():
            history.reset()

    def _start(self, sequences: list[Sequence]) -> ContinuousBatch | ThreadedBatches:
        expected, longest = self._serving or (len(sequences), 0)
        half = self.limits.cache_bytes // self.limits.bytes_per_token // 2
        histories = expected if self._serving and longest <= half else 0
        longest = max(min(longest, half), *(s.max_length for s in sequences))  # more is not asked for yet
        page = self._page(longest)
        pages, need, slots = self.limits.pages(page, longest), -(-longest // page), self.limits.max_sequences
        count, threads = share_threads(self.model, min(self.max_batches, slots, pages // need), expected)
        slots, pages, histories = slots // count, pages // count, -(-histories // count)
        share = history_share(pages, need, histories) if histories else 0
        self._allocate(count, min(pages, slots * need + histories * share), page)
        pool = self.caches[0].pages - histories * share
        self._longest = pool * page
        with torch_threads(threads):
            forward = forward_for(self.model)
        self._cleanup.enter_context(forward.packed_weights())
        budget = _PREFILL_TOKENS_CPU if self.device.type == "cpu" else _PREFILL_TOKENS
        batches = []
        for cache in self.caches:
            scheduler = Scheduler(slots, budget, PagePool(pool, page), HistoryPages(pool, histories, share))
            batch = ContinuousBatch(scheduler, forward, cache, self.agree, self.device, self.vision)
            batch.experts = experts_blocks(self.model) if self.keeps_experts else ()
            if self.graphs and isinstance(cache, DeviceCache) and isinstance(forward, LlamaForward):
                batch.graphs = DecodingGraphs(forward.hidden, cache, self.device)
            batches.append(batch)
        alone = count == 1 and threads == torch.get_num_threads()
        return batches[0] if alone else self._cleanup.enter_context(ThreadedBatches(batches, threads))

    def _page(self, longest: int) -> int:
        """Returns the size of pages: that of the present ones, if they are large enough and not too large."""
        if self._reads_pages:
            return device_cache.PAGE
        kept, page = self.caches[0].page if self.caches else 0, min(PAGE, longest)
        return kept if kept > page and self.limits.fits(kept, longest) else page

    def _allocate(self, count: int, pages: int, page: int) -> None:
        caches = self.caches
        if len(caches) != count or (caches[0].page, pages) != (page, min(pages, caches[0].pages)):
            self.caches = caches = []  # frees the old ones before there are new ones
            kind = DeviceCache if self._reads_pages else PanelCache if has_panels(self.model) else KVCache
            self.caches = [kind(pages, page) for _ in range(count)]

    @property
    def _reads_pages(self) -> bool:
        return device_cache.reads_pages(self.model, self.device)
