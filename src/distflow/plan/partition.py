"""A partition: which replica of a layout has which samples of a step."""

from dataclasses import dataclass

from distflow.plan.layout import Layout


@dataclass(frozen=True)
class Partition:
    """An assignment of the samples of a step to the replicas of a layout. Nodes that share one exchange nothing."""

    id: str
    layout: Layout
    whole_groups: bool  # all samples of a prompt are in one replica
    balance: str | None  # the field whose lengths are evened out over the replicas
    uneven: bool = False  # after a resample or chunks: which replicas have how many samples depends on what was moved
    chunk: tuple[int, int] | None = None  # (i, n): only the samples of the i-th of n chunks

    def largest_share(self, samples: int, group_size: int) -> int:
        """Returns the number of samples of the largest replica, unless the partition is uneven."""
        unit = group_size if self.whole_groups else 1
        return -(-samples // unit // self.layout.dp) * unit


Touch = tuple[Partition, str]  # a field that a task reads or writes, and where
