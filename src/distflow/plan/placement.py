"""Where each stage runs: named groups of ranks, and a group and a layout per node or per role."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distflow.errors import PlacementError, cut, suggest
from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.layout import Layout, format_ranks, parse_ranks

ALL = "all"
MOST = 65_536  # workers


@dataclass(frozen=True)
class Place:
    """A group and how it is divided; `dp` follows from the size of the group when it is not given."""

    group: str = ALL
    dp: int | None = None
    tp: int = 1


@dataclass(frozen=True)
class Placement:
    """The most specific entry wins: node, then role, then default."""

    workers: int
    groups: Mapping[str, str] = field(default_factory=dict)
    default: Place = Place()
    roles: Mapping[str, Place] = field(default_factory=dict)
    nodes: Mapping[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PlacementError(f"workers: {self.workers}; at least one worker is needed")
        if self.workers > MOST:
            raise PlacementError(f"workers: {self.workers}; there may be {MOST:,} at most")
        if ALL in self.groups:
            raise PlacementError(f"placement.groups.{ALL}: this name always means every worker; choose another")
        _ = self.ranks

    @cached_property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        groups = {g: parse_ranks(text, self.workers, f"placement.groups.{g}") for g, text in self.groups.items()}
        return {ALL: tuple(range(self.workers)), **groups}

    def layout(self, node_id: str, role: str) -> Layout:
        if node_id in self.nodes:
            return self._layout(self.nodes[node_id], f"placement.nodes.{node_id}")
        if role in self.roles:
            return self._layout(self.roles[role], f"placement.roles.{role}")
        return self._layout(self.default, "placement.default")

    def source_layout(self, flow: Flow) -> Layout:
        """The loader reads where it is told to; untold, where its first reader runs."""
        if SOURCE in self.nodes:
            return self.layout(SOURCE, SOURCE)
        first: Node | None = next((n for n in flow.order if set(n.reads) & set(flow.source)), None)
        return self.layout(first.id, first.role) if first else self.layout(SOURCE, SOURCE)

    def check(self, flow: Flow) -> None:
        """Every entry names something that exists."""
        ids, roles = {n.id for n in flow.nodes} | {SOURCE}, {n.role for n in flow.nodes}
        for node_id in self.nodes:
            if node_id not in ids:
                raise PlacementError(f"placement.nodes: the flow has no node '{cut(node_id)}'{suggest(node_id, ids)}")
        for role in self.roles:
            if role not in roles:
                raise PlacementError(f"placement.roles: no node has the role '{cut(role)}'{suggest(role, roles)}")
        self._layout(self.default, "placement.default")
        for kind, places in (("nodes", self.nodes), ("roles", self.roles)):
            for name, place in places.items():
                self._layout(place, f"placement.{kind}.{name}")

    def _layout(self, place: Place, where: str) -> Layout:
        if place.group not in self.ranks:
            raise PlacementError(f"{where}: unknown group '{cut(place.group)}'{suggest(place.group, self.ranks)}")
        ranks, tp = self.ranks[place.group], place.tp
        n = len(ranks)
        dp = place.dp if place.dp is not None else n // tp if tp else 0
        if tp < 1 or dp < 1 or dp * tp != n:
            fitting = ", ".join(f"dp {n // t} × tp {t}" for t in range(1, n + 1) if n % t == 0 and t <= 64)
            asked = f"dp {place.dp} × tp {tp}" if place.dp else f"tp {tp}"
            raise PlacementError(
                f"{where}: {asked} does not fit group '{place.group}' of {n} ranks"
                f" ({format_ranks(ranks)}); what fits: {fitting}"
            )
        return Layout(ranks, dp, tp)
