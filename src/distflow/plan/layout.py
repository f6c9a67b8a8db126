"""Layouts: a set of ranks divides the samples of a step over dp replicas of sp × tp ranks each."""

import re
from dataclasses import dataclass
from functools import cached_property

from distflow.errors import PlacementError, cut


@dataclass(frozen=True)
class Layout:
    """`dp × sp × tp` over `ranks`, tp innermost: a replica is sp × tp consecutive ranks, which hold the same samples.

    Tensor-parallel ranks divide the weights of each layer, sequence-parallel ones the tokens of each sequence.
    """

    ranks: tuple[int, ...]
    dp: int
    tp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        if self.dp * self.sp * self.tp != len(self.ranks):
            shape = " × ".join(f"{dim} {size}" for dim, size in self._dims.items())
            raise PlacementError(f"{shape} does not fit {len(self.ranks)} ranks")

    @property
    def replica_size(self) -> int:
        return self.sp * self.tp

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.ranks[i : i + self.replica_size] for i in range(0, len(self.ranks), self.replica_size))

    @property
    def without_sp(self) -> "Layout":
        """The same ranks as dp × sp replicas: so they hold the weights, and so they work where nothing is divided."""
        return Layout(self.ranks, self.dp * self.sp, self.tp)

    @cached_property
    def _replica_of(self) -> dict[int, int]:
        return {r: d for d, replica in enumerate(self.replicas) for r in replica}

    def replica_of(self, rank: int) -> int | None:
        """Returns the index of the replica that a rank belongs to, if any."""
        return self._replica_of.get(rank)

    def __str__(self) -> str:
        return "·".join(f"{dim}{size}" for dim, size in self._dims.items() if dim == "dp" or size > 1)

    @property
    def _dims(self) -> dict[str, int]:
        return {"dp": self.dp, **({"sp": self.sp} if self.sp > 1 else {}), "tp": self.tp}


def contiguous_share(units: int, replicas: int, replica: int) -> tuple[int, int]:
    """Returns the units [first, last) of a replica with contiguous shares: unit i is in replica i * replicas // units.

    Shares differ by at most one unit. With fewer units than replicas, the empty replicas lie between the others.
    """
    return -(-replica * units // replicas), -(-(replica + 1) * units // replicas)


_PART = re.compile(r"(?P<a>\d{1,9})(?P<ap>%?)(?:(?P<dash>-)(?:(?P<b>\d{1,9})(?P<bp>%?))?)?\Z")


def parse_ranks(text: str, workers: int, where: str) -> tuple[int, ...]:
    """Parses `all`, `0-3`, `4-` (to the last), `0,2,5-7`, or shares of the workers: `0%-50%`, `50%-`."""
    if text.strip() == "all":
        return tuple(range(workers))
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        m = _PART.match(part)
        if not m or (m["ap"] and not m["dash"]):
            raise PlacementError(
                f"{where}: '{cut(text)}' is not a set of ranks; write 'all', '0-3', '4-', '0,2,5-7' or '0%-50%'"
            )
        first = workers * int(m["a"]) // 100 if m["ap"] else int(m["a"])
        if m["b"] is None:
            last = workers - 1 if m["dash"] else first
        else:
            last = workers * int(m["b"]) // 100 - 1 if m["bp"] else int(m["b"])
        if last < first:
            raise PlacementError(f"{where}: '{text}' is an empty range of {workers} workers")
        if last >= workers:
            raise PlacementError(
                f"{where}: '{text}' names ranks {first}-{last}, but there are {workers} workers (0-{workers - 1})"
            )
        ranks += range(first, last + 1)
    if len(set(ranks)) != len(ranks):
        raise PlacementError(f"{where}: '{text}' names a rank twice")
    return tuple(ranks)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Formats ranks as briefly as `parse_ranks` can read them: `0-3,8`."""
    parts: list[str] = []
    i = 0
    while i < len(ranks):
        j = i
        while j + 1 < len(ranks) and ranks[j + 1] == ranks[j] + 1:
            j += 1
        parts.append(str(ranks[i]) if i == j else f"{ranks[i]}-{ranks[j]}")
        i = j + 1
    return ",".join(parts)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Formats ranks: `0-511`, or a long scattered set by its ends and its size, `0,2,4,…,1022 (512)`."""
    text = format_ranks(ranks)
    parts = text.split(",")
    return text if len(text) <= 24 else f"{','.join(parts[:3])},…,{parts[-1]} ({len(ranks)})"
