"""Checks that rollout engines have the trained weights: the version that the plan says, bit by bit."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distflow.comm.collectives import Communication, all_reduce
from distflow.errors import WeightsError
from distflow.weights.checksums import checksums, counted
from distflow.weights.shards import Shards, TensorSpec


class WeightCheck:
    """The check on one rank; all ranks of both layouts take part. It costs log N small messages."""

    def __init__(self, source: Shards, destination: Shards, rank: int, dtype: torch.dtype) -> None:
        self.source, self.destination, self.rank, self.dtype = source, destination, rank, dtype
        self.ranks = sorted({*source.layout.ranks, *destination.layout.ranks})

    def agree(self, version: int) -> Communication[None]:
        """Raises on all ranks unless all of them send or expect the same version."""
        both = torch.tensor([version, -version])
        newest, oldest = (yield from all_reduce(self.rank, self.ranks, both, torch.maximum)).tolist()
        if newest != -oldest:
            raise WeightsError(
                f"rank {self.rank} syncs weights of version {version}, and others versions {-oldest} to {newest};"
                " the workers are not at the same step: restart the run from its newest checkpoint"
            )

    def compare(
        self, specs: Sequence[TensorSpec], given: Mapping[str, Tensor], held: Mapping[str, Tensor], version: int
    ) -> Communication[None]:
        """Raises if the engine's `held` weights differ from the weights that the trainer has `given`."""
        trained = torch.zeros(len(specs), dtype=torch.int64)
        replica = self.source.layout.replica_of(self.rank)
        if replica is not None and replica < self.source.shard:  # of replicas, one is enough
            mine = torch.tensor(counted(specs, self.source, self.rank))
            some = [spec for spec, yes in zip(specs, mine.tolist(), strict=True) if yes]
            trained[mine] = checksums(some, self.source, self.rank, given, self.dtype)
        trained = yield from all_reduce(self.rank, self.ranks, trained, torch.add)
        place = self.destination.layout.replica_of(self.rank)
        if place is None:
            return
        own = checksums(specs, self.destination, self.rank, held, self.dtype)
        cut = torch.tensor([self.destination.cuts(spec) for spec in specs])
        together = yield from all_reduce(self.rank, self.destination.layout.replicas[place], own * cut, torch.add)
        generates = torch.where(cut, together, own)
        wrong = [spec.name for spec, same in zip(specs, (trained == generates).tolist(), strict=True) if not same]
        if wrong:
            more = f" and {len(wrong) - 1} other parameters differ" if wrong[1:] else " differs"
            raise WeightsError(
                f"rank {self.rank}: the rollout engine does not have the trained weights of version {version}:"
                f" {wrong[0]}{more}; its weight sync is incomplete or something else has changed them."
                " Another engine (rollout.engine) may do better; rollout.verify_every: 0 turns this check off"
            )
