"""One continuous batch: sequences join it, run in lockstep, and leave it as they finish."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from distflow.model.attention import Attention
from distflow.rollout.builtin.forward import Forward
from distflow.rollout.builtin.kv_cache import Decode, Extension, KVCache, Prefill
from distflow.rollout.builtin.scheduler import Scheduler
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.engine import SamplingParams, Wake, never
from distflow.rollout.sampling import sample
from distflow.util.arrays import Ints

Agree = Callable[[Tensor], Tensor]


class ContinuousBatch:
    """Runs the model on the sequences that the scheduler admits. `agree` makes the tokens of tensor-parallel replicas
    one and the same."""

    def __init__(
        self, scheduler: Scheduler, forward: Forward, cache: KVCache, agree: Agree, device: torch.device
    ) -> None:
        self.scheduler, self.forward, self.cache = scheduler, forward, cache
        self.agree, self.device = agree, device

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.scheduler.add(sequences)

    @torch.inference_mode()
    def step(self, wake: Wake = never) -> list[Sequence]:
        """Runs until at least one sequence is finished, or `wake` is true, and returns all that are finished."""
        finished: list[Sequence] = []
        woken = False
        while self.scheduler.has_unfinished and not finished and not woken:
            for prompts in self.scheduler.admit():
                self._prefill(prompts)
            finished += self.scheduler.retire()  # a response may be one token long
            if self.scheduler.running:
                self._decode(*self.scheduler.ready())
                finished += self.scheduler.retire()
            finished = [s for s in finished if not s.aborted]
            woken = wake()
        return finished

    def _prefill(self, prompts: list[list[Sequence]]) -> None:
        """Computes each prompt once, for all sequences that share it, and samples their first tokens.

        Of sequences that go on in a history, which all or none do, only what is not in it is computed.
        """
        firsts = [sequences[0] for sequences in prompts]
        starts, ends = [s.reused for s in firsts], [len(s.request.prompt) for s in firsts]
        tokens = torch.tensor([t for s in firsts for t in s.request.prompt[s.reused :]])
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        tables = [s.pages for s in firsts]
        attention = (
            Extension(self.cache, starts, ends, tables, self.device)
            if any(starts)
            else Prefill(self.cache, ends, tables)
        )
        last = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)]).cumsum(0) - 1
        logits = self._logits(tokens, positions, attention, last)
        shared = ((sequences[0], s) for sequences in prompts for s in sequences[1:])
        self.cache.copy((first.pages, s.pages, len(s.request.prompt)) for first, s in shared)
        row_of = torch.tensor([row for row, sequences in enumerate(prompts) for _ in sequences])
        self._sample([s for sequences in prompts for s in sequences], logits[row_of.to(self.device)])

    def _decode(self, sequences: list[Sequence], tables: Ints) -> None:
        """Samples one more token for each sequence; row i of `tables` has the pages of sequence i."""
        tokens = torch.tensor([s.tokens[-1] for s in sequences])
        positions = torch.tensor([s.length - 1 for s in sequences])
        attention = Decode(self.cache, positions, tables, self.device)
        self._sample(sequences, self._logits(tokens, positions, attention))

    def _logits(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None = None) -> Tensor:
        kept = None if keep is None else keep.to(self.device)
        return self.forward(tokens.to(self.device), positions.to(self.device), attention, kept)

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> None:
        for (params, seed), rows in _by_params(sequences).items():
            chosen = [sequences[i] for i in rows]
            scores = logits if len(rows) == len(sequences) else logits[torch.tensor(rows, device=self.device)]
            sample_ids = np.array([s.request.sample_id for s in chosen], np.int64)
            positions = np.array([s.position for s in chosen], np.int64)
            tokens, logprobs = sample(scores, params, seed, sample_ids, positions)
            # In one tensor, so that the host waits for the device once; float64 holds both exactly.
            both = torch.stack((self.agree(tokens).double(), logprobs.double())).tolist()
            for sequence, token, logprob in zip(chosen, *both, strict=True):
                sequence.append(int(token), logprob)


def _by_params(sequences: list[Sequence]) -> dict[tuple[SamplingParams, int], list[int]]:
    """Rows that are sampled together; nearly always all of them."""
    first = sequences[0].request
    if all(s.request.params is first.params and s.request.seed == first.seed for s in sequences):
        return {(first.params, first.seed): list(range(len(sequences)))}
    rows = defaultdict(list)
    for i, s in enumerate(sequences):
        rows[s.request.params.next_token, s.request.seed].append(i)
    return rows
