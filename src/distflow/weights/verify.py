"""Checks that rollout engines have the weights that were trained: of the version that the plan says, and bit by bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distflow.comm.collectives import Communication, all_reduce
from distflow.errors import WeightsError
from distflow.weights.checksums import checksums, counted
from distflow.weights.shards import Shards, Spec


class WeightCheck:
    """The check of one rank; all ranks of both layouts take part. Costs log N small messages and one's own share."""

    def __init__(self, source: Shards, target: Shards, rank: int, dtype: torch.dtype) -> None:
        self.source, self.target, self.rank, self.dtype = source, target, rank, dtype
        self.ranks = sorted({*source.layout.ranks, *target.layout.ranks})

    def agree(self, version: int) -> Communication[None]:
        """Raises on all ranks unless they sync the same version: the one that each has, or expects."""
        both = torch.tensor([version, -version])
        newest, oldest = (yield from all_reduce(self.rank, self.ranks, both, torch.maximum)).tolist()
        if newest != -oldest:
            raise WeightsError(
                f"rank {self.rank} hands weights of version {version} over, and others versions {-oldest} to {newest};"
                " the workers are not at the same step: restart the run from its newest checkpoint"
            )

    def compare(
        self, specs: Sequence[Spec], given: Mapping[str, Tensor], held: Mapping[str, Tensor], version: int
    ) -> Communication[None]:
        """Raises where an engine's `held` weights are not those that the trainer has `given`."""
        trained = torch.zeros(len(specs), dtype=torch.int64)
        replica = self.source.layout.replica_of(self.rank)
        if replica is not None and replica < self.source.shard:  # of replicas, one is enough
            mine = torch.tensor(counted(specs, self.source, self.rank))
            some = [spec for spec, yes in zip(specs, mine.tolist(), strict=True) if yes]
            trained[mine] = checksums(some, self.source, self.rank, given, self.dtype)
        trained = yield from all_reduce(self.rank, self.ranks, trained, torch.add)
        place = self.target.layout.replica_of(self.rank)
        if place is None:
            return
        own = checksums(specs, self.target, self.rank, held, self.dtype)
        cut = torch.tensor([self.target.cuts(spec) for spec in specs])
        together = yield from all_reduce(self.rank, self.target.layout.replicas[place], own * cut, torch.add)
        generates = torch.where(cut, together, own)
        wrong = [spec.name for spec, same in zip(specs, (trained == generates).tolist(), strict=True) if not same]
        if wrong:
            more = f" and {len(wrong) - 1} other parameters differ" if wrong[1:] else " differs"
            raise WeightsError(
                f"rank {self.rank}: the rollout engine does not have the trained weights of version {version}:"
                f" {wrong[0]}{more}; its weight sync is incomplete or something else has changed them."
                " Another engine (rollout.engine) may do better; rollout.verify_every: 0 turns this check off"
            )
