"""Write a flow as an ordinary Python function: `@flow` runs it once, on symbols, and keeps the graph."""

import functools
import inspect
import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from distflow.errors import FlowError, cut, shown, suggest
from distflow.flow.graph import SOURCE, Flow, Node, NodeType
from distflow.flow.importing import reference

Names = str | Iterable[str]


def names(value: Names | None) -> tuple[str, ...] | None:
    """One name or many, as a tuple."""
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class NodeSpec:
    """What `@node` says of a function. None means: derived from the call."""

    id: str | None = None
    role: str | None = None
    type: NodeType | None = None
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    whole_groups: bool | None = None
    whole_batch: bool | None = None
    balance: str | None = None
    hand_over: bool | None = None
    ignores: tuple[str, ...] | None = None

    def reading(self, given: Iterable[str], prefix: str = "") -> tuple[str, ...]:
        """What a node reads of the fields it is given."""
        fields = tuple(dict.fromkeys(given))
        if self.reads is not None:
            return tuple(prefix + f if prefix + f in fields else f for f in self.reads)
        return tuple(f for f in fields if f.removeprefix(prefix) not in (self.ignores or ()))

    def node(self, node_id: str, fn: Callable[..., Any], reads: tuple[str, ...], **rest: Any) -> Node:
        """The node this function becomes."""
        _check_constants(node_id, fn, rest.get("params", {}), bool(rest.get("method")))
        rest.setdefault("role", self.role or "compute")
        return Node(
            id=node_id,
            type=self.type or "compute",
            reads=reads,
            # A function that declares nothing writes one field, called like its node.
            writes=tuple(rest.get("prefix", "") + f for f in ((node_id,) if self.writes is None else self.writes)),
            call=reference(fn),
            whole_groups=bool(self.whole_groups),
            whole_batch=bool(self.whole_batch),
            balance=self.balance,
            hand_over=bool(self.hand_over),
            fn=fn,
            **rest,
        )


def node(
    fn: Callable[..., Any] | None = None,
    *,
    id: str | None = None,
    role: str | None = None,
    type: NodeType | None = None,
    reads: Names | None = None,
    writes: Names | None = None,
    whole_groups: bool | None = None,
    whole_batch: bool | None = None,
    balance: str | None = None,
    hand_over: bool | None = None,
    ignores: Names | None = None,
) -> Any:
    """Mark a function as a node: inside a flow a call to it is traced, outside it runs as usual.

    It takes one `Batch` (with the fields it reads) and returns a dict of the fields it writes, or the one column
    itself. `reads` defaults to all fields of the values it is called with but those it `ignores`; `writes` to one field
    called like the node. `whole_groups` keeps the samples of a prompt together, `whole_batch` gives each of the node's
    workers all samples of the step, which is for small fields; `balance` names the field whose lengths are evened out
    over the workers, `hand_over` (of a method) brings the role's newest weights first.

    A call inside a flow may also say: `after=value`, to come after another node without reading of it;
    `prefix="greedy_"`, to begin all fields it writes with that, and to see fields that begin so without it, which lets
    a flow use a node twice; and `refill=k` of a node that writes a truth value per sample: prompts of which any sample
    is refused are replaced by further ones, until the step is full or k times as many were drawn. All that leads to
    such a node is then run again; all other nodes come after it and see a full step.

    Also an expression, to rename what a node is or writes: `node(score, id="strict", writes="strict")(rollout)`.
    """
    given: dict[str, Any] = {
        "id": id,
        "role": role,
        "type": type,
        "reads": names(reads),
        "writes": names(writes),
        "whole_groups": whole_groups,
        "whole_batch": whole_batch,
        "balance": balance,
        "hand_over": hand_over,
        "ignores": names(ignores),
    }
    if fn is None:
        return functools.partial(node, **given)
    spec = replace(spec_of(fn), **{k: v for k, v in given.items() if v is not None})
    inner = inspect.unwrap(fn)

    @functools.wraps(inner)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if _nodes.get() is not None or any(isinstance(a, Value) for a in args):
            return _record(inner, spec, spec.id or inner.__name__, args, kwargs)
        return inner(*args, **kwargs)

    traced.__distflow__ = spec  # type: ignore[attr-defined]
    return traced


def spec_of(fn: Any) -> NodeSpec:
    spec = getattr(fn, "__distflow__", NodeSpec())
    assert isinstance(spec, NodeSpec)
    return spec


@dataclass(frozen=True, eq=False)
class Value:
    """A symbol: the fields one node writes. Pass it on, or pick fields of it: `rollout["response"]`."""

    node: str
    fields: tuple[str, ...]

    def __getitem__(self, field: Names) -> "Value":
        if not isinstance(field, str | list | tuple) or not all(isinstance(f, str) for f in field):
            self._refuse(f"indexed by {field!r} (fields are picked by name)")
        picked = names(field) or ()
        for f in picked:
            if f not in self.fields:
                if self.node == SOURCE:
                    near = suggest(f, self.fields)
                    raise FlowError(f"the data has no column '{f}'{near} (data.rename gives a column another name)")
                raise FlowError(f"node '{self.node}' writes no field '{f}'{suggest(f, self.fields)}")
        return Value(self.node, picked)

    def _refuse(self, what: str) -> NoReturn:
        raise FlowError(
            f"the value of node '{self.node}' was {what}: a flow runs once, on symbols, so its shape"
            " cannot depend on data. If this happened inside a function of yours, mark that function with @node"
        )

    def __iter__(self) -> NoReturn:  # by name, or Python would fall back to indexing
        self._refuse("iterated over")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        self._refuse(f"asked for its attribute '{name}' (fields are picked with [\"{name}\"])")


def _refusing(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: Value, *_: Any) -> NoReturn:
        self._refuse(f"used in a computation ({operation})")

    return refuse


_OPERATIONS = (
    "bool", "len", "contains", "setitem", "delitem", "call", "float", "int", "index", "round", "eq", "ne", "lt", "le",
    "gt", "ge", "neg", "pos", "invert", "abs", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv",
    "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow", "matmul", "rmatmul", "and", "rand",
    "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
)  # fmt: skip
for _name in _OPERATIONS:
    setattr(Value, f"__{_name}__", _refusing(_name))
Value.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(frozen=True)
class FlowFunction:
    """What `@flow` returns. `trace` binds the roles and gives the graph."""

    fn: Callable[..., Any]
    also: Callable[..., Any] | None = None

    @property
    def roles(self) -> list[str]:
        """Its parameters after the data, as far as they have no default."""
        return [p.name for p in self._parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]

    @property
    def constants(self) -> dict[str, Any]:
        """What the algorithm can be told: parameters that have a default, its own and those of `also`."""
        shared = inspect.signature(self.also).parameters.values() if self.also else ()
        return {p.name: p.default for p in (*shared, *self._parameters[1:]) if p.default is not p.empty}

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.fn).parameters.values())

    def trace(
        self,
        source: Iterable[str],
        roles: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> Flow:
        """`source`: the data columns; `roles`: parameter name → the function or class that plays it;
        `constants`: for the parameters that have a default."""
        roles = dict(roles or {})
        name = self.fn.__name__
        if not self._parameters:
            raise FlowError(f"flow '{name}' takes no parameter; its first one is the data")
        for c in constants or {}:
            if c not in self.constants:
                raise FlowError(f"algo: flow '{name}' has no constant '{cut(c)}'{suggest(c, self.constants)}")
        for r in roles:
            if r not in self.roles:
                raise FlowError(f"flow '{name}' has no role '{cut(r)}'{suggest(r, self.roles)}")
        missing = [p for p in self.roles if p not in roles]
        if missing:
            raise FlowError(
                f"flow '{name}': role '{missing[0]}' is not bound; say who plays it:"
                f" `roles: {{{missing[0]}: file.py:function}}`"
            )
        columns = tuple(source)
        nodes: list[Node] = []
        token = _nodes.set(nodes)
        try:
            self.fn(Value(SOURCE, columns), **{p: _Role(p, roles[p]) for p in self.roles}, **(constants or {}))
        except Exception as e:
            what = str(e) if isinstance(e, FlowError) else f"flow '{name}': {type(e).__name__}: {e}"
            raise FlowError(what + _place(e, self.fn)) from e
        finally:
            _nodes.reset(token)
        return Flow(name, columns, tuple(nodes))


def flow(fn: Callable[..., Any] | None = None, *, also: Callable[..., Any] | None = None) -> Any:
    """The decorator: the first parameter is the data, the others are roles (functions or classes), or constants if they
    have a default.

    A flow that ends in `**rest` takes the constants of `also` as well: the function it passes them on to.
    """
    return functools.partial(flow, also=also) if fn is None else FlowFunction(fn, also)


def _place(error: Exception, fn: Callable[..., Any]) -> str:
    """Where in the user's flow it happened."""
    if fn.__module__.startswith("distflow."):
        return ""
    file = fn.__code__.co_filename
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(file).name}:{lines[-1]})" if lines else ""


_nodes: ContextVar[list[Node] | None] = ContextVar("nodes", default=None)


class _Role:
    """Who plays a role, inside a flow: a function is called, `reward(x)`; of a class the methods, `judge.score(x)`."""

    def __init__(self, role: str, target: Any) -> None:
        if not inspect.isclass(target) and not inspect.isfunction(target):
            raise FlowError(f"role '{role}' is played by a {type(target).__name__}; name a function or a class")
        self._role, self._target = role, target

    def __call__(self, *args: Any, **kwargs: Any) -> Value:
        if inspect.isclass(self._target):
            methods = ", ".join(_methods(self._target)) or "it has none"
            raise FlowError(
                f"role '{self._role}' is the class {reference(self._target)}; call a method of it: {methods}"
            )
        spec = spec_of(self._target)
        extra = {"role": spec.role or self._role}
        return _record(inspect.unwrap(self._target), spec, spec.id or self._role, args, kwargs, extra)

    def __getattr__(self, method: str) -> Callable[..., Value]:
        if not inspect.isclass(self._target):
            raise FlowError(
                f"role '{self._role}' is the function {reference(self._target)}, which has no method '{method}';"
                f" call it: {self._role}(…)"
            )
        return functools.partial(_call_method, self._role, self._target, method)


def _call_method(role: str, cls: type, method: str, *args: Any, **kwargs: Any) -> Value:
    fn = method_of(role, cls, method, f"node '{role}.{method}'")
    spec = spec_of(fn)
    return _record(
        inspect.unwrap(fn), spec, spec.id or f"{role}.{method}", args, kwargs, {"role": role, "method": True}
    )


def method_of(role: str, cls: type, method: str, where: str) -> Callable[..., Any]:
    fn = getattr(cls, method, None)
    if not inspect.isfunction(fn):
        near = suggest(method, _methods(cls))
        raise FlowError(f"{where}: role '{role}' ({reference(cls)}) has no method '{method}'{near}")
    return fn


def _methods(cls: type) -> list[str]:
    return [m for m in dir(cls) if inspect.isfunction(getattr(cls, m)) and not m.startswith("_")]


def _record(
    fn: Callable[..., Any],
    spec: NodeSpec,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Value:
    nodes = _nodes.get()
    if nodes is None:
        raise FlowError(f"'{name}' was called on a symbol outside a flow")
    taken = {n.id for n in nodes}
    node_id = name
    for k in range(2, len(taken) + 3):
        if node_id not in taken:
            break
        node_id = f"{name}_{k}"
    # What a call says of its node, unless the function has a parameter of that name.
    said = {k: kwargs.pop(k) for k in ("refill", "prefix") if k in kwargs and k not in inspect.signature(fn).parameters}
    after = kwargs.pop("after", ())
    after = list(after) if isinstance(after, list | tuple) else [after]
    for a in (*args, *after):
        if not isinstance(a, Value):
            raise FlowError(
                f"node '{node_id}': positional arguments and `after` are values of other nodes, not {shown(a)};"
                " pass constants by keyword"
            )
    reads = spec.reading((f for a in args for f in a.fields), said.get("prefix", ""))
    # A value of which nothing is read still says "after this".
    order = [a.node for a in after] + [a.node for a in args if not set(reads) & set(a.fields)]
    order = [i for i in dict.fromkeys(order) if i != SOURCE]
    made = spec.node(node_id, fn, reads, after=tuple(order), params=kwargs, **said, **extra)
    nodes.append(made)
    return Value(node_id, made.writes)


def _check_constants(node_id: str, fn: Callable[..., Any], params: Mapping[str, Any], method: bool) -> None:
    """Plain JSON values, for parameters that the function has besides the batch and the context."""
    parameters = inspect.signature(fn).parameters
    known = [p for p in list(parameters)[1 + method :] if p != "ctx"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in params.items():
        if isinstance(value, Value):
            raise FlowError(
                f"node '{node_id}': the value of '{value.node}' is passed as '{key}='; pass values by position"
            )
        if not isinstance(key, str):
            raise FlowError(f"node '{node_id}': constant {shown(key)} has no name; its name is a text")
        if key not in known and not open_ended:
            raise FlowError(f"node '{node_id}': {reference(fn)} has no parameter '{cut(key)}'{suggest(key, known)}")
        try:
            json.dumps(value, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            raise FlowError(
                f"node '{node_id}': constant '{cut(key)}' is a {type(value).__name__}; constants are plain JSON values"
            ) from None
