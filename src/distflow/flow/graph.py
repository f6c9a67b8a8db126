"""The graph of an algorithm: nodes that read and write named fields. Edges follow from the fields."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from distflow.errors import FlowError, cut, shown, suggest

NodeType = Literal["compute", "inference", "train"]
NODE_TYPES: tuple[NodeType, ...] = get_args(NodeType)
SOURCE = "data"  # id and role of the loader, which writes the columns of the data files

_NAME = re.compile(r"[A-Za-z_][\w.]*\Z")


@dataclass(frozen=True)
class Node:
    """One stage of a flow. `call` is the reference of its function, `fn` the function itself once it is loaded."""

    id: str
    role: str = "compute"
    type: NodeType = "compute"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    call: str = ""
    after: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    whole_groups: bool = False  # all samples of a prompt must be on one worker
    balance: str | None = None  # assign samples so that the lengths of this field are even over the workers
    generates: bool = False  # the newest weights of its role are synced before it runs
    sequence_parallel: bool = False  # the ranks of a replica may divide the tokens of its sequences
    whole_batch: bool = False  # each rank of the node has all samples of the step
    dynamic_sampling: int = 0  # rejected prompts are replaced, drawing at most this many times the batch; see `node`
    prefix: str = ""  # added to the fields it writes, removed from the fields it reads
    method: bool = False  # `fn` is a method of the class that implements the role
    fn: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (self.id, *self.writes):
            if not _NAME.match(name):
                raise FlowError(
                    f"node '{cut(self.id)}': '{cut(name)}' is not a name; use letters, digits, '_' and '.',"
                    " a letter or '_' first"
                )
        for verb, fields in (("reads", self.reads), ("writes", self.writes)):
            for f in fields:
                if fields.count(f) > 1:
                    raise FlowError(f"node '{self.id}': {verb} '{f}' twice; name it once")
        if self.id == SOURCE:
            raise FlowError(f"node '{SOURCE}': this id is taken by the loader; choose another")
        if self.type not in NODE_TYPES:
            raise FlowError(f"node '{self.id}': unknown type '{cut(self.type)}'{suggest(self.type, NODE_TYPES)}")
        local_names = [self.local_name(f) for f in self.reads]
        for f in local_names:
            if local_names.count(f) > 1:
                raise FlowError(
                    f"node '{self.id}': reads '{f}' and '{self.prefix}{f}', which are the same without its prefix;"
                    " read only one"
                )
        if type(self.dynamic_sampling) is not int or self.dynamic_sampling < 0:
            raise FlowError(
                f"node '{self.id}': dynamic_sampling is {shown(self.dynamic_sampling)}; set a number, 1 or more"
            )
        if self.dynamic_sampling and len(self.writes) != 1:
            raise FlowError(f"node '{self.id}': samples dynamically, so it must write one field: what to keep")
        if self.balance is not None and self.balance not in self.reads:
            raise FlowError(
                f"node '{self.id}': balance names field '{cut(self.balance)}', which the node does not read"
                f"{suggest(self.balance, self.reads)}"
            )

    def local_name(self, field: str) -> str:
        """Returns the name under which the function sees a field."""
        return field.removeprefix(self.prefix) if self.prefix else field


@dataclass(frozen=True)
class Flow:
    """A validated graph of nodes. `source` are the data columns, which the loader writes."""

    name: str
    source: tuple[str, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise FlowError(f"flow '{self.name}' has no nodes; it must call functions marked with @node")
        self._check_ids()
        self._check_fields()
        _ = self.depth  # raises if there is a cycle
        self._check_dynamic_sampling()

    def node(self, node_id: str) -> Node:
        return self._by_id[node_id]

    @cached_property
    def _by_id(self) -> dict[str, Node]:
        return {n.id: n for n in self.nodes}

    @cached_property
    def writer(self) -> dict[str, str]:
        """Maps a field to the id of the node that writes it."""
        writer = dict.fromkeys(self.source, SOURCE)
        writer.update((f, n.id) for n in self.nodes for f in n.writes)
        return writer

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Maps a field to the ids of all nodes that read it, in declaration order."""
        readers: dict[str, tuple[str, ...]] = dict.fromkeys(self.writer, ())
        for n in self.nodes:
            for f in n.reads:
                readers[f] += (n.id,)
        return readers

    def parents(self, node: Node) -> tuple[str, ...]:
        """Returns the ids of the nodes that must run before this one, without the loader."""
        ids = [self.writer[f] for f in node.reads] + list(node.after)
        return tuple(dict.fromkeys(i for i in ids if i != SOURCE))

    @cached_property
    def depth(self) -> dict[str, int]:
        """Maps a node to its longest distance from a root."""
        parents = {n.id: self.parents(n) for n in self.nodes}
        depth: dict[str, int] = {}
        waiting = list(parents)
        while waiting:
            ready = [i for i in waiting if all(p in depth for p in parents[i])]
            if not ready:
                raise FlowError(f"flow '{self.name}': {self._describe_cycle(waiting, parents)}")
            for i in ready:
                depth[i] = max((depth[p] + 1 for p in parents[i]), default=0)
            waiting = [i for i in waiting if i not in depth]
        return depth

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """The global order: nodes of the sampling loop first, then by depth, then by declaration."""
        return tuple(sorted(self.nodes, key=lambda n: (n.id not in self.sampling_loop, self.depth[n.id])))

    @cached_property
    def sampling_node(self) -> Node | None:
        """Returns the node that samples dynamically, if there is one."""
        return next((n for n in self.nodes if n.dynamic_sampling), None)

    @cached_property
    def sampling_loop(self) -> frozenset[str]:
        """Ids of the nodes that run again for further prompts: the node that resamples, and all upstream of it."""
        loop: set[str] = set()
        waiting = [self.sampling_node.id] if self.sampling_node else []
        while waiting:
            loop.add(i := waiting.pop())
            waiting += [p for p in self.parents(self.node(i)) if p not in loop]
        return frozenset(loop)

    def _check_ids(self) -> None:
        ids: set[str] = set()
        for n in self.nodes:
            if n.id in ids:
                raise FlowError(f"flow '{self.name}': two nodes have the id '{n.id}'; rename one of them")
            ids.add(n.id)
        for n in self.nodes:
            for a in n.after:
                if a not in ids and a != SOURCE:
                    raise FlowError(f"node '{n.id}': depends on unknown node '{cut(a)}'{suggest(a, ids | {SOURCE})}")

    def _check_fields(self) -> None:
        writer = dict.fromkeys(self.source, SOURCE)
        for n in self.nodes:
            for f in n.writes:
                if f in writer:
                    hint = (
                        f"give the column another name with `data.rename: {{{f}: …}}`"
                        if writer[f] == SOURCE
                        else "give one of them another name with `writes`"
                    )
                    raise FlowError(f"node '{n.id}': field '{f}' has two writers, '{writer[f]}' and '{n.id}'; {hint}")
                writer[f] = n.id
        for n in self.nodes:
            for f in n.reads:
                if f not in writer:
                    raise FlowError(f"node '{n.id}': reads unknown field '{cut(f)}'{suggest(f, writer)}")

    def _check_dynamic_sampling(self) -> None:
        resamples = [n.id for n in self.nodes if n.dynamic_sampling]
        if len(resamples) > 1:
            raise FlowError(
                f"flow '{self.name}': '{resamples[0]}' and '{resamples[1]}' both sample dynamically; only one node can"
            )
        for n in self.nodes:
            if n.type == "train" and n.id in self.sampling_loop:
                raise FlowError(
                    f"node '{n.id}': trains before '{resamples[0]}', which samples dynamically; train after it"
                )

    def _describe_cycle(self, waiting: Iterable[str], parents: Mapping[str, tuple[str, ...]]) -> str:
        stuck = set(waiting)
        path = [min(stuck)]
        while path.count(path[-1]) < 2:
            path.append(next(p for p in parents[path[-1]] if p in stuck))
        cycle = path[path.index(path[-1]) :][::-1]  # the walk went from child to parent
        steps = []
        for a, b in pairwise(cycle):
            fields = [f for f in self.node(b).reads if self.writer[f] == a]
            steps.append(f"'{b}' " + (f"reads '{fields[0]}' of '{a}'" if fields else f"comes after '{a}'"))
        return f"cycle {' → '.join(cycle)}: {', '.join(steps)}; remove one of these"
