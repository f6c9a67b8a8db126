"""One continuous batch: sequences join it, run in lockstep, and leave it as they finish."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.model.attention import Attention
from distflow.model.experts import ExpertsBlock, Routing
from distflow.rollout.builtin.decoding_graphs import DecodingGraphs
from distflow.rollout.builtin.forward import Forward
from distflow.rollout.builtin.kv_cache import KVCache
from distflow.rollout.builtin.llama_forward import LlamaForward
from distflow.rollout.builtin.scheduler import Scheduler
from distflow.rollout.builtin.sequence import Sequence
from distflow.rollout.builtin.vision import Vision
from distflow.rollout.engine import SamplingParams, Wake, never
from distflow.rollout.sampling import sample
from distflow.util.arrays import Ints
from distflow.util.copies import to_device

Agree = Callable[[Tensor], Tensor]


class ContinuousBatch:
    """Runs the model on the sequences that the scheduler admits. `agree` makes the tokens of tensor-parallel replicas
    one and the same."""

    def __init__(
        self,
        scheduler: Scheduler,
        forward: Forward,
        cache: KVCache,
        agree: Agree,
        device: torch.device,
        vision: Vision | None = None,
    ) -> None:
        self.scheduler, self.forward, self.cache = scheduler, forward, cache
        self.agree, self.device, self.vision = agree, device, vision
        self.experts: Rows[ExpertsBlock] = ()  # whose choices completions have
        self.graphs: DecodingGraphs | None = None  # of decoding steps, if the device records them

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
                if self.scheduler.is_long(prompts) and not self.vision:
                    self.scheduler.in_pieces += prompts
                else:
                    self._prefill(prompts)
            if piece := self.scheduler.next_piece():
                self._prefill_piece(*piece)
            finished += self.scheduler.retire()  # a response may be one token long
            if self.scheduler.running:
                sequences, tables = self.scheduler.ready()
                if sequences:
                    self._decode(sequences, tables)
                    finished += self.scheduler.retire()
            finished = [s for s in finished if not s.aborted]
            woken = wake()
        return finished

    def _prefill_piece(self, sequences: list[Sequence], end: int) -> None:
        """Computes the next tokens of a long prompt. Between its pieces others decode, so it does not stop them."""
        first = sequences[0]
        if end == len(first.request.prompt):
            self._prefill([sequences])
        else:
            _, chosen = self._compute([first], [end])
            if chosen is not None:
                first.experts.append(chosen)
            first.prefilled = end

    def _prefill(self, prompts: list[list[Sequence]]) -> None:
        """Computes each prompt once, for all sequences that share it, and samples their first tokens.

        Of sequences that go on in a history, which all or none do, only what is not in it is computed.
        """
        firsts = [sequences[0] for sequences in prompts]
        logits, chosen = self._compute(firsts, [len(s.request.prompt) for s in firsts], prompts)
        if chosen is not None:
            ends = np.cumsum([len(s.request.prompt) - s.prefilled for s in firsts])[:-1]
            for sequences, part in zip(prompts, np.split(chosen, ends), strict=True):
                pieces = [*sequences[0].experts, part]
                for s in sequences:
                    s.experts = list(pieces)
        shared = ((sequences[0], s) for sequences in prompts for s in sequences[1:])
        self.cache.copy((first.pages, s.pages, len(s.request.prompt)) for first, s in shared)
        row_of = torch.tensor([row for row, sequences in enumerate(prompts) for _ in sequences])
        self._sample([s for sequences in prompts for s in sequences], logits[to_device(row_of, self.device)])

    def _compute(
        self, firsts: list[Sequence], ends: list[int], prompts: list[list[Sequence]] | None = None
    ) -> tuple[Tensor, NDArray[np.integer] | None]:
        """Computes tokens of prompts up to `ends`; returns the logits behind the last of each, and experts."""
        starts = [s.prefilled for s in firsts]
        attention = self.cache.attention(np.array(starts), np.array(ends), [s.pages for s in firsts], self.device)
        last = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)]).cumsum(0) - 1
        if self.vision and prompts:
            return self.vision.prefill(prompts, attention, last), None
        tokens = [t for s, end in zip(firsts, ends, strict=True) for t in s.request.prompt[s.prefilled : end]]
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        return self._logits(torch.tensor(tokens), positions, attention, last)

    def _decode(self, sequences: list[Sequence], tables: Ints) -> None:
        """Samples one more token for each sequence; row i of `tables` has the pages of sequence i."""
        tokens = torch.tensor([s.tokens[-1] for s in sequences])
        positions = torch.tensor([s.length - 1 for s in sequences])
        if self.graphs and (hidden := self.graphs(tokens, positions.numpy(), tables)) is not None:
            assert isinstance(self.forward, LlamaForward)
            self._sample(sequences, self.forward.logits(hidden))
            return
        rotary = positions
        if self.vision:
            tokens, rotary = self.vision.of_sampled(sequences)
        attention = self.cache.attention(positions.numpy(), positions.numpy() + 1, tables, self.device)
        logits, chosen = self._logits(tokens, rotary, attention)
        if chosen is not None:
            for s, row in zip(sequences, chosen, strict=True):
                s.experts.append(row[None])
        self._sample(sequences, logits)

    def _logits(
        self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None = None
    ) -> tuple[Tensor, NDArray[np.integer] | None]:
        """Returns logits, and the experts of all rows, [rows, layers, top-k], if they are wanted."""
        kept = None if keep is None else to_device(keep, self.device)
        routing = Routing(keeps=bool(self.experts))
        for block in self.experts:
            block.routing = routing
        logits = self.forward(to_device(tokens, self.device), to_device(positions, self.device), attention, kept)
        if not self.experts:
            return logits, None
        small = torch.int8 if routing.logits[0].shape[1] <= 128 else torch.int16
        return logits, torch.stack(routing.chosen, 1).to(small).cpu().numpy()

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> None:
        for (params, seed), rows in _by_params(sequences).items():
            chosen = [sequences[i] for i in rows]
            scores = logits if len(rows) == len(sequences) else logits[to_device(torch.tensor(rows), self.device)]
            sample_ids = np.array([s.request.sample_id for s in chosen], np.int64)
            positions = np.array([s.position for s in chosen], np.int64)
            tokens, logprobs = sample(scores, params, seed, sample_ids, positions, [s.seen for s in chosen])
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
