"""Write a flow as a list of nodes in YAML: `id, role, type, deps or reads/writes, call`."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.errors import FlowError, cut, shown, suggest
from distflow.flow.graph import SOURCE, Flow
from distflow.flow.importing import load
from distflow.flow.trace import NodeSpec, method_of, names, spec_of

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
    "refill",
    "prefix",
)


@dataclass(frozen=True)
class _Row:
    """One entry of the list, checked and with its function loaded."""

    id: str
    role: str
    spec: NodeSpec
    deps: tuple[str, ...]
    after: tuple[str, ...]
    params: dict[str, Any]
    fn: Callable[..., Any]
    method: bool
    said: dict[str, Any]  # refill, prefix

    @property
    def writes(self) -> tuple[str, ...]:
        prefix = self.said.get("prefix", "")
        return tuple(prefix + f for f in ((self.id,) if self.spec.writes is None else self.spec.writes))


def from_list(
    name: str,
    source: Iterable[str],
    entries: Sequence[Mapping[str, Any]],
    roles: Mapping[str, Any] | None = None,
    base: Path | None = None,
) -> Flow:
    """The same graph a traced function gives. `deps` reads all that those nodes write, unless `reads` says what."""
    columns = tuple(source)
    calls = [c for e in entries if isinstance(e, Mapping) and isinstance(c := e.get("call"), str)]
    called = {c.partition(".")[0] for c in calls if ":" not in c}
    for role in roles or {}:
        if role not in called:
            raise FlowError(f"flow '{name}': no node calls the role '{cut(role)}'; remove it or call it")
    rows = [_read(entry, i, roles or {}, base) for i, entry in enumerate(entries)]
    written = {SOURCE: columns} | {r.id: r.writes for r in rows}
    nodes = []
    for row in rows:
        for d in row.deps:
            if d not in written:
                raise FlowError(f"node '{row.id}': depends on unknown node '{cut(d)}'{suggest(d, written)}")
        reads = row.spec.reading((f for d in row.deps for f in written[d]), row.said.get("prefix", ""))
        order = [d for d in row.deps if not set(written[d]) & set(reads)]
        after = tuple(i for i in dict.fromkeys((*row.after, *order)) if i != SOURCE)
        rest = {"role": row.role, "after": after, "params": row.params, "method": row.method, **row.said}
        nodes.append(row.spec.node(row.id, inspect.unwrap(row.fn), reads, **rest))
    return Flow(name, columns, tuple(nodes))


def _read(entry: Mapping[str, Any], index: int, roles: Mapping[str, Any], base: Path | None) -> _Row:
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
            raise FlowError(f"{where}: needs '{key}', a text")
    for key, kind, what in (
        ("params", Mapping, "a mapping of constants"),
        ("role", str, "a text"),
        ("type", str, "a text"),
        ("balance", str, "the name of a field"),
        ("whole_groups", bool, "true or false"),
        ("whole_batch", bool, "true or false"),
        ("refill", int, "a number of rounds"),
        ("prefix", str, "a text"),
    ):
        if entry.get(key) is not None and not isinstance(entry[key], kind):
            raise FlowError(f"{where}: '{key}' is {shown(entry[key])}, not {what}")

    fn, role, method = _function(entry["call"], where, roles, base)
    spec = spec_of(fn)
    said: dict[str, Any] = {
        "type": entry.get("type"),
        "reads": _names(entry, "reads", where),
        "writes": _names(entry, "writes", where),
        "whole_groups": entry.get("whole_groups"),
        "whole_batch": entry.get("whole_batch"),
        "balance": entry.get("balance"),
    }
    return _Row(
        id=entry["id"],
        role=entry.get("role") or role,
        spec=replace(spec, **{k: v for k, v in said.items() if v is not None}),
        deps=_names(entry, "deps", where) or (),
        after=_names(entry, "after", where) or (),
        params=dict(entry.get("params") or {}),
        fn=fn,
        method=method,
        said={k: entry[k] for k in ("refill", "prefix") if entry.get(k) is not None},
    )


def _function(
    call: str, where: str, roles: Mapping[str, Any], base: Path | None
) -> tuple[Callable[..., Any], str, bool]:
    """`role.method`, `role`, or a reference; the role its node has unless it says another; whether it is a method."""
    role, dot, method = call.partition(".")
    if dot and ":" not in call and inspect.isclass(roles.get(role)):
        return method_of(role, roles[role], method, where), role, True
    if dot and inspect.isfunction(roles.get(role)):
        raise FlowError(f"{where}: role '{role}' is a function, which has no method '{method}'; write `call: {role}`")
    if ":" not in call and call not in roles:
        raise FlowError(
            f"{where}: call '{cut(call)}' is neither 'file.py:function' nor 'package.module:function' nor of a role"
            f"{suggest(role, roles)}"
        )
    fn = roles[call] if call in roles else load(call, where, base)
    if inspect.isclass(fn):
        raise FlowError(f"{where}: '{call}' is a class; make it a role and call a method of it: 'role.method'")
    if not inspect.isfunction(fn):
        raise FlowError(f"{where}: '{call}' is a {type(fn).__name__}, not a function")
    return fn, spec_of(fn).role or (call if call in roles else "compute"), False


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return names(value)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise FlowError(f"{where}: '{key}' is {shown(value)}, not a name or a list of names")
