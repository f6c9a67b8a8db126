"""A flow as a list of nodes in YAML: `id, role, type, deps or reads/writes, call`."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.errors import FlowError, cut, shown, suggest
from distflow.flow.graph import SOURCE, Flow
from distflow.flow.importing import load
from distflow.flow.trace import NodeSpec, as_tuple, method_of, spec_of

KEYS = (
    "id",
    "role",
    "type",
    "deps",
    "reads",
    "writes",
    "call",
    "after",
    "params",
    "whole_groups",
    "whole_batch",
    "balance",
    "dynamic_sampling",
    "prefix",
)


@dataclass(frozen=True)
class _Entry:
    """An entry of the list, validated and with its function loaded."""

    id: str
    role: str
    spec: NodeSpec
    deps: tuple[str, ...]
    after: tuple[str, ...]
    params: dict[str, Any]
    fn: Callable[..., Any]
    method: bool
    options: dict[str, Any]  # dynamic_sampling, prefix

    @property
    def prefix(self) -> str:
        return str(self.options.get("prefix", ""))


def from_list(
    name: str,
    source: Iterable[str],
    entries: Sequence[Mapping[str, Any]],
    roles: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> Flow:
    """Returns the graph, the same as by tracing. `deps` reads all fields of these nodes, unless `reads` is given."""
    columns = tuple(source)
    calls = [c for e in entries if isinstance(e, Mapping) and isinstance(c := e.get("call"), str)]
    called = {c.partition(".")[0] for c in calls if ":" not in c}
    for role in roles or {}:
        if role not in called:
            raise FlowError(f"flow '{name}': no node calls the role '{cut(role)}'; remove it or call it")
    parsed = [_parse(entry, i, roles or {}, base) for i, entry in enumerate(entries)]
    writes = {SOURCE: columns} | {e.id: e.spec.fields_written(e.id, e.prefix) for e in parsed}
    nodes = []
    for e in parsed:
        for d in e.deps:
            if d not in writes:
                raise FlowError(f"node '{e.id}': depends on unknown node '{cut(d)}'{suggest(d, writes)}")
        others = {f for d in writes.keys() - {SOURCE, e.id} for f in writes[d]}
        reads = e.spec.select_reads((f for d in e.deps for f in writes[d]), columns, others, e.prefix)
        order = [d for d in e.deps if not set(writes[d]) & set(reads)]
        after = tuple(i for i in dict.fromkeys((*e.after, *order)) if i != SOURCE)
        rest = {"role": e.role, "after": after, "params": e.params, "method": e.method, **e.options}
        nodes.append(e.spec.node(e.id, inspect.unwrap(e.fn), reads, **rest))
    return Flow(name, columns, tuple(nodes))


def _parse(entry: Mapping[str, Any], index: int, roles: Mapping[str, Any], base: Path | None) -> _Entry:
    where = f"node number {index + 1}"
    if not isinstance(entry, Mapping):
        raise FlowError(f"{where}: is {shown(entry)}, not a mapping of {', '.join(KEYS)}")
    if isinstance(entry.get("id"), str):
        where = f"node '{cut(entry['id'])}'"
    for key in entry:
        if key not in KEYS:
            raise FlowError(f"{where}: unknown key '{cut(str(key))}'{suggest(key, KEYS)}")
    for key in ("id", "call"):
        if not isinstance(entry.get(key), str):
            raise FlowError(f"{where}: needs '{key}', a string")
    for key, kind, expected in (
        ("params", Mapping, "a mapping of constants"),
        ("role", str, "a string"),
        ("type", str, "a string"),
        ("balance", str, "the name of a field"),
        ("whole_groups", bool, "true or false"),
        ("whole_batch", bool, "true or false"),
        ("dynamic_sampling", int, "a number of rounds"),
        ("prefix", str, "a string"),
    ):
        if entry.get(key) is not None and not isinstance(entry[key], kind):
            raise FlowError(f"{where}: '{key}' is {shown(entry[key])}, not {expected}")

    fn, role, method = _function(entry["call"], where, roles, base)
    spec = spec_of(fn).of_role(role) if method else spec_of(fn)
    arguments: dict[str, Any] = {
        "type": entry.get("type"),
        "reads": _names(entry, "reads", where),
        "writes": _names(entry, "writes", where),
        "whole_groups": entry.get("whole_groups"),
        "whole_batch": entry.get("whole_batch"),
        "balance": entry.get("balance"),
    }
    return _Entry(
        id=entry["id"],
        role=entry.get("role") or role,
        spec=replace(spec, **{k: v for k, v in arguments.items() if v is not None}),
        deps=_names(entry, "deps", where) or (),
        after=_names(entry, "after", where) or (),
        params=dict(entry.get("params") or {}),
        fn=fn,
        method=method,
        options={k: entry[k] for k in ("dynamic_sampling", "prefix") if entry.get(k) is not None},
    )


def _function(
    call: str, where: str, roles: Mapping[str, Any], base: Path | None
) -> tuple[Callable[..., Any], str, bool]:
    """Resolves `role.method`, `role` or a reference to (function, default role of the node, whether it is a method)."""
    role, dot, method = call.partition(".")
    if dot and ":" not in call and inspect.isclass(roles.get(role)):
        return method_of(role, roles[role], method, where), role, True
    if dot and inspect.isfunction(roles.get(role)):
        raise FlowError(f"{where}: role '{role}' is a function, which has no method '{method}'; write `call: {role}`")
    if ":" not in call and call not in roles:
        raise FlowError(
            f"{where}: call '{cut(call)}' is neither 'file.py:function' nor 'package.module:function' nor a role"
            f"{suggest(role, roles)}"
        )
    fn = roles[call] if call in roles else load(call, where, base)
    if inspect.isclass(fn):
        raise FlowError(f"{where}: '{call}' is a class; bind it to a role and call one of its methods: 'role.method'")
    if not inspect.isfunction(fn):
        raise FlowError(f"{where}: '{call}' is a {type(fn).__name__}, not a function")
    return fn, spec_of(fn).role or (call if call in roles else "compute"), False


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return as_tuple(value)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise FlowError(f"{where}: '{key}' is {shown(value)}, not a name or a list of names")
