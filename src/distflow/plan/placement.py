"""Placement: named rank sets, and for each node or role a rank set and a layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from distflow.errors import PlacementError, cut, suggest
from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.layout import Layout, format_ranks, parse_ranks
from distflow.util.text import names

ALL = "all"
MAX_WORKERS = 65_536


@dataclass(frozen=True)
class Place:
    """A rank set by name, divided into dp × sp × tp; `dp` defaults to the size of the set / (`sp` × `tp`)."""

    ranks: str = ALL
    dp: int | None = None
    tp: int = 1
    sp: int = 1


@dataclass(frozen=True)
class Placement:
    """Rank sets as in a config (`{"rollout": "0-3"}`), and the entries that use them: node, then role, then default."""

    workers: int
    rank_sets: Mapping[str, str] = field(default_factory=dict)
    default: Place = Place()
    roles: Mapping[str, Place] = field(default_factory=dict)
    nodes: Mapping[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PlacementError(f"workers: {self.workers}; at least one worker is needed")
        if self.workers > MAX_WORKERS:
            raise PlacementError(f"workers: {self.workers}; at most {MAX_WORKERS:,} are supported")
        if ALL in self.rank_sets:
            raise PlacementError(f"placement.ranks.{ALL}: this name always means every worker; choose another")
        _ = self.ranks  # parsed here, so that a mistake is reported early

    @cached_property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Rank set → its ranks, `all` included."""
        named = {k: parse_ranks(text, self.workers, f"placement.ranks.{k}") for k, text in self.rank_sets.items()}
        return {ALL: tuple(range(self.workers)), **named}

    def layout(self, n: Node) -> Layout:
        """Returns the layout of a node, by its most specific entry; without sp, if it divides no sequences."""
        layout = self._entry(n.id, n.role)
        return layout if n.sequence_parallel else layout.without_sp

    def source_layout(self, flow: Flow) -> Layout:
        """Returns the layout of the loader: its own entry, or else the layout of its first reader."""
        first: Node | None = next((n for n in flow.order if set(n.reads) & set(flow.source)), None)
        return self.layout(first) if first and SOURCE not in self.nodes else self._entry(SOURCE, SOURCE).without_sp

    def _entry(self, node_id: str, role: str) -> Layout:
        if node_id in self.nodes:
            return self._layout(self.nodes[node_id], f"placement.nodes.{node_id}")
        if role in self.roles:
            return self._layout(self.roles[role], f"placement.roles.{role}")
        return self._layout(self.default, "placement.default")

    def check(self, flow: Flow) -> None:
        """Raises unless every entry names a node or role of the flow and fits its rank set."""
        ids, roles = {n.id for n in flow.nodes} | {SOURCE}, {n.role for n in flow.nodes}
        for node_id in self.nodes:
            if node_id not in ids:
                raise PlacementError(f"placement.nodes: the flow has no node '{cut(node_id)}'{suggest(node_id, ids)}")
        for role in self.roles:
            if role not in roles:
                raise PlacementError(f"placement.roles: no node has the role '{cut(role)}'{suggest(role, roles)}")
        self._layout(self.default, "placement.default")
        dividing = {"nodes": {n.id for n in flow.nodes if n.sequence_parallel}}
        dividing["roles"] = {n.role for n in flow.nodes if n.sequence_parallel}
        for kind, places in (("nodes", self.nodes), ("roles", self.roles)):
            for name, place in places.items():
                self._layout(place, f"placement.{kind}.{name}")
                if place.sp > 1 and name not in dividing[kind]:
                    raise PlacementError(
                        f"placement.{kind}.{name}.sp: {place.sp}, but it divides no sequences; that do only"
                        f" {names(sorted(dividing[kind])) or 'models that are trained or give log-probs'}; leave it out"
                    )

    def _layout(self, place: Place, where: str) -> Layout:
        if place.ranks not in self.ranks:
            raise PlacementError(f"{where}: unknown rank set '{cut(place.ranks)}'{suggest(place.ranks, self.ranks)}")
        ranks, tp, sp = self.ranks[place.ranks], place.tp, place.sp
        n, size = len(ranks), tp * sp
        dp = place.dp if place.dp is not None else n // size if size else 0
        if min(tp, sp, dp) < 1 or dp * size != n:
            between = f" × sp {sp}" if sp != 1 else ""
            # With the sp that was asked for where that is possible, else without.
            shared = sp if sp > 0 and n % sp == 0 else 1
            kept = f" × sp {shared}" if shared > 1 else ""
            divisors = [t for t in range(1, n // shared + 1) if n // shared % t == 0 and t <= 64]
            layouts = ", ".join(f"dp {n // shared // t}{kept} × tp {t}" for t in divisors)
            requested = f"dp {place.dp}{between} × tp {tp}" if place.dp else f"{between[3:]}{between and ' × '}tp {tp}"
            raise PlacementError(
                f"{where}: {requested} does not fit rank set '{place.ranks}' of {n} ranks"
                f" ({format_ranks(ranks)}); use one of: {layouts}"
            )
        return Layout(ranks, dp, tp, sp)
