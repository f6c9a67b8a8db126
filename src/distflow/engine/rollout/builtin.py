"""The built-in rollout engine: continuous batching over a KV cache, on a Hugging Face model's own modules.

On a CPU with several threads the samples are shared among lanes, each a batch of its own in a thread of its own: small
operations leave no thread idle, and one lane computes while another reads memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.data.balance import Ints
from distflow.data.batch import Ragged, join
from distflow.engine.model.attention import Attention
from distflow.engine.model.llama_family import reentrant
from distflow.engine.rollout.forward import Forward, forward_of
from distflow.engine.rollout.kv_cache import Cache, Decode, Prefill
from distflow.engine.rollout.sampling import Sampling, choose
from distflow.errors import ConfigError
from distflow.plan.units import human_bytes

_PREFILL, _PREFILL_CPU = 8192, 1024  # prompt tokens computed in one pass; a CPU keeps what is in between in its cache
_LANE = 64  # samples that are worth a lane: all lanes read all weights

Agree = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Completions:
    """In the order of the samples asked for."""

    tokens: Ragged  # int64
    logprobs: Ragged  # float32, as sampled
    finished: Tensor  # bool: ended by itself, not by the limit

    def select(self, index: Ints) -> "Completions":
        return Completions(
            self.tokens.select(index), self.logprobs.select(index), self.finished[torch.from_numpy(index)]
        )


class Rollout:
    """`cache_bytes` and `max_sequences` bound how many sequences run at once; `bytes_per_token` is what one holds.

    `agree` makes the tokens of tensor-parallel replicas one and the same. `lanes`: so many at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bytes_per_token: int,
        cache_bytes: int,
        max_sequences: int,
        agree: Agree = lambda tokens: tokens,
        device: torch.device | None = None,
        lanes: int = 1,
    ) -> None:
        self.bytes_per_token, self.agree = bytes_per_token, agree
        self.device = device or torch.device("cpu")
        self.prefill = _PREFILL_CPU if self.device.type == "cpu" else _PREFILL
        self.cache_bytes, self.max_sequences = cache_bytes, max_sequences
        self.model, self.lanes = model, lanes if reentrant(model) else 1
        self._caches: list[Cache] = []  # one for each lane

    def generate(
        self, prompts: Sequence[Sequence[int]], prompt_of: Ints, ids: Ints, how: Sampling, seed: int
    ) -> Completions:
        """A response for each sample i, to prompt `prompt_of[i]`, with the noise of `ids[i]`."""
        caches = self._room(len(ids), max(map(len, prompts), default=1) + how.max_tokens)
        order = np.argsort(prompt_of, kind="stable")  # samples of a prompt in one lane, but for a few
        shares = np.array_split(order, len(caches))
        threads = torch.get_num_threads()
        each = max(1, threads // len(caches))

        @torch.inference_mode()
        def run(lane: int) -> Completions:
            share = shares[lane]
            batch = _Running(self, forward, caches[lane], prompts, prompt_of[share], ids[share], how, seed)
            while batch.waiting or batch.count:
                if batch.waiting and batch.room:
                    batch.admit()
                if batch.count:
                    batch.decode()
            return batch.completions()

        try:
            torch.set_num_threads(each)
            forward = forward_of(self.model)
            with forward.ready(), ThreadPoolExecutor(len(caches), "lane", torch.set_num_threads, (each,)) as pool:
                done = list(pool.map(run, range(len(caches)))) if len(caches) > 1 else [run(0)]
        finally:
            torch.set_num_threads(threads)
        return _joined(done).select(np.argsort(order))

    def _room(self, samples: int, longest: int) -> list[Cache]:
        """A cache for each lane, with slots for as many sequences as fit; kept from call to call."""
        fitting = self.cache_bytes // (self.bytes_per_token * longest)
        if not fitting:
            raise ConfigError(
                f"rollout.kv_cache_gb: a sequence of {longest} tokens needs"
                f" {human_bytes(self.bytes_per_token * longest)} of KV cache and there are"
                f" {human_bytes(self.cache_bytes)}; raise it, or lower rollout.max_tokens"
            )
        most = min(self.max_sequences, fitting)
        lanes = max(1, min(self.lanes, samples // _LANE, most))
        slots = min(max(1, -(-samples // lanes)), most // lanes)
        if len(self._caches) != lanes or self._caches[0].slots < slots or self._caches[0].longest < longest:
            self._caches = []  # before there are new ones
            self._caches = [Cache(slots, longest) for _ in range(lanes)]
        return self._caches


def _joined(parts: Sequence[Completions]) -> Completions:
    tokens, logprobs = (join([getattr(p, name) for p in parts]) for name in ("tokens", "logprobs"))
    assert isinstance(tokens, Ragged)
    assert isinstance(logprobs, Ragged)
    return Completions(tokens, logprobs, torch.cat([p.finished for p in parts]))


class _Running:
    """One lane of a call: the samples that wait, those in the batch (the first `count` slots), what they have said."""

    def __init__(
        self,
        engine: Rollout,
        forward: Forward,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        prompt_of: Ints,
        ids: Ints,
        how: Sampling,
        seed: int,
    ) -> None:
        self.engine, self.prompts, self.prompt_of, self.ids = engine, prompts, prompt_of, ids
        self.forward = forward
        self.how, self.seed = how, seed
        self.sizes = np.array([len(p) for p in prompts], np.int64)
        samples = len(ids)
        self.cache, self.slots = cache, cache.slots
        # Samples of a prompt one after the other, prompts of one length too: they are computed together.
        self.waiting = deque(np.lexsort((prompt_of, self.sizes[prompt_of])).tolist())
        self.count = 0
        self.sample = np.zeros(self.slots, np.int64)  # in each slot
        self.last = torch.zeros(
            self.slots, dtype=torch.int64, device=engine.device
        )  # its newest token, not yet seen by the model
        self.made = np.zeros(samples, np.int64)  # tokens so far, of each sample
        self.tokens = np.zeros((samples, how.max_tokens), np.int32)
        self.logprobs = np.zeros((samples, how.max_tokens), np.float32)
        self.finished = np.zeros(samples, bool)
        self.stop = np.array(sorted(how.stop), np.int64)

    @property
    def room(self) -> int:
        """Free slots, once they are worth a pass of their own."""
        free = self.slots - self.count
        return free if free >= min(len(self.waiting), max(1, self.slots // 8)) else 0

    def admit(self) -> None:
        """Compute waiting prompts, each once for all of its samples that find room."""
        taken = [self.waiting.popleft() for _ in range(min(self.room, len(self.waiting)))]
        slots = range(self.count, self.count + len(taken))
        self.sample[slots.start : slots.stop] = taken
        self.count = slots.stop
        groups = [list(g) for _, g in groupby(zip(slots, taken, strict=True), lambda pair: self.prompt_of[pair[1]])]
        budget: list[list[tuple[int, int]]] = []
        for group in [*groups, None]:
            tokens = sum(int(self.sizes[self.prompt_of[g[0][1]]]) for g in [*budget, *([group] if group else [])])
            if budget and (group is None or tokens > self.engine.prefill):
                self._prefill(budget)
                budget = []
            if group:
                budget.append(group)
        self._leave()

    def _prefill(self, groups: list[list[tuple[int, int]]]) -> None:
        """`groups`: the (slot, sample) pairs of each prompt."""
        prompts = [self.prompts[self.prompt_of[g[0][1]]] for g in groups]
        sizes = [len(p) for p in prompts]
        tokens = torch.tensor([t for p in prompts for t in p])
        positions = torch.cat([torch.arange(n) for n in sizes])
        attention = Prefill(self.cache, sizes, [g[0][0] for g in groups])
        logits = self._logits(tokens, positions, attention, torch.tensor(sizes).cumsum(0) - 1)
        pairs = [(g[0][0], slot, i) for i, g in enumerate(groups) for slot, _ in g]
        if copies := [(a, b) for a, b, _ in pairs if a != b]:
            sources, targets = torch.tensor(copies).T
            self.cache.copy(sources, targets, max(sizes))
        slots = np.array([slot for _, slot, _ in pairs])
        self._choose(slots, logits[torch.tensor([i for _, _, i in pairs])])

    def decode(self) -> None:
        """One more token for everybody in the batch."""
        slots = np.arange(self.count)
        sample = self.sample[: self.count]
        positions = torch.from_numpy(self.sizes[self.prompt_of[sample]] + self.made[sample] - 1)
        positions = positions.to(self.engine.device)
        self._choose(slots, self._logits(self.last[: self.count], positions, Decode(self.cache, positions)))
        self._leave()

    def _logits(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None = None) -> Tensor:
        device = self.engine.device
        return self.forward(tokens.to(device), positions.to(device), attention, keep)

    def _choose(self, slots: Ints, logits: Tensor) -> None:
        sample = self.sample[slots]
        made = self.made[sample]
        tokens, logprobs = choose(logits, self.how, self.seed, self.ids[sample], made)
        tokens = self.engine.agree(tokens)
        self.last[torch.from_numpy(slots)] = tokens
        chosen = tokens.cpu().numpy()
        self.tokens[sample, made] = chosen
        self.logprobs[sample, made] = logprobs.cpu().numpy()
        self.made[sample] = made + 1
        self.finished[sample] = np.isin(chosen, self.stop)

    def _leave(self) -> None:
        """Who is done gives its slot to one from the end, so that no slot in the middle is empty."""
        sample = self.sample[: self.count]
        gone = self.finished[sample] | (self.made[sample] >= self.how.max_tokens)
        if not gone.any():
            return
        left = self.count - int(gone.sum())
        holes, movers = np.flatnonzero(gone[:left]), left + np.flatnonzero(~gone[left:])
        if len(holes):
            moved = self.sample[movers]
            length = int((self.sizes[self.prompt_of[moved]] + self.made[moved]).max())
            sources, targets = torch.from_numpy(movers), torch.from_numpy(holes)
            self.cache.copy(sources, targets, length)
            self.sample[holes] = moved
            self.last[targets] = self.last[sources]
        self.count = left

    def completions(self) -> Completions:
        said = np.arange(self.how.max_tokens) < self.made[:, None]
        return Completions(
            Ragged.packed(torch.from_numpy(self.tokens[said].astype(np.int64)), self.made),
            Ragged.packed(torch.from_numpy(self.logprobs[said]), self.made),
            torch.from_numpy(self.finished),
        )
