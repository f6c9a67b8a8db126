"""Flows as ordinary Python functions: `@flow` traces one by calling it once on symbols, and keeps the graph."""

import functools
import inspect
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from distflow.errors import FlowError, cut, shown, suggest
from distflow.flow.constants import check_constant
from distflow.flow.graph import SOURCE, Flow, Node, NodeType
from distflow.flow.importing import reference

Names = str | Iterable[str]


def as_tuple(value: Names | None) -> tuple[str, ...] | None:
    """Returns one name or several as a tuple."""
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class NodeSpec:
    """The arguments of `@node` for a function. None means: derived from the call."""

    id: str | None = None
    role: str | None = None
    type: NodeType | None = None
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None
    whole_groups: bool | None = None
    whole_batch: bool | None = None
    balance: str | None = None
    generates: bool | None = None
    sequence_parallel: bool | None = None
    ignores: tuple[str, ...] | None = None
    optional: tuple[str, ...] | None = None
    whole_rows: bool | None = None

    def select_reads(
        self, inputs: Iterable[str], source: Iterable[str], written: Container[str], prefix: str = ""
    ) -> tuple[str, ...]:
        """Returns the fields that a node reads, of its arguments; `source`: the columns of the data.

        `written`: all fields that nodes before it write.
        """
        columns = tuple(source)
        fields = tuple(dict.fromkeys((*inputs, *(columns if self.whole_rows else ()))))
        optional = [
            name if name in columns else f
            for name in self.optional or ()
            if (f := prefix + name) in written or name in columns
        ]
        if self.reads is not None:
            fields = tuple(prefix + f if prefix + f in fields else f for f in self.reads)
        else:
            fields = tuple(f for f in fields if f.removeprefix(prefix) not in (self.ignores or ()))
        return (*fields, *(f for f in optional if f not in fields))

    def of_role(self, role: str) -> "NodeSpec":
        """Returns the spec of a role's method: `{role}` in a field that it writes is the name of the role."""
        return self if self.writes is None else replace(self, writes=tuple(w.format(role=role) for w in self.writes))

    def fields_written(self, node_id: str, prefix: str = "") -> tuple[str, ...]:
        """Returns the fields that a node writes: unless declared, one field with the name of the node."""
        return tuple(prefix + f for f in ((node_id,) if self.writes is None else self.writes))

    def node(self, node_id: str, fn: Callable[..., Any], reads: tuple[str, ...], **rest: Any) -> Node:
        """Returns the node of this function; `rest` are further attributes of it."""
        _check_constants(node_id, fn, rest.get("params", {}), bool(rest.get("method")))
        rest.setdefault("role", self.role or "compute")
        return Node(
            id=node_id,
            type=self.type or "compute",
            reads=reads,
            writes=self.fields_written(node_id, rest.get("prefix", "")),
            call=reference(fn),
            whole_groups=bool(self.whole_groups),
            whole_batch=bool(self.whole_batch),
            balance=self.balance,
            generates=bool(self.generates),
            sequence_parallel=bool(self.sequence_parallel),
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
    generates: bool | None = None,
    sequence_parallel: bool | None = None,
    ignores: Names | None = None,
    optional: Names | None = None,
    whole_rows: bool | None = None,
    **unknown: Any,
) -> Any:
    """Marks a function as a node: inside a flow a call to it is traced, outside a flow it runs as usual.

    The function takes a `Batch` with the fields it reads and returns a dict of the fields it writes, or the one column.
    `reads` defaults to all fields of the values it is called with, except the ones it `ignores`; `writes` to one field
    with the name of the node. `optional` are fields that it also reads where a node before it writes them, or the data
    have them. `whole_groups`
    keeps the samples of a prompt together; `whole_batch` gives all samples of the step to each of the node's workers
    (for small fields); `balance` names the field whose lengths are evened out over the workers; `generates` (for a
    method) syncs the role's newest weights first; `sequence_parallel` says that it runs a model, whose sequences the
    ranks of a replica may divide (`sp` of a placement); `whole_rows` adds all columns of the data to its input.

    A call inside a flow takes three more arguments. `after=value` orders the node after another one without reading
    from it. `prefix="greedy_"` is added to the fields that the node writes and removed from its inputs, so that
    a flow can use a node twice. `dynamic_sampling=k` is for a node that writes one boolean per sample: a prompt with a
    false sample is replaced by another, until the step is full or k times as many prompts were drawn. All nodes
    upstream run again for the new prompts; all others run after it and see a full step.

    `node(score, id="strict", writes="strict")(rollout)` uses a function under another id or with other fields.
    """
    arguments: dict[str, Any] = {
        "id": id,
        "role": role,
        "type": type,
        "reads": as_tuple(reads),
        "writes": as_tuple(writes),
        "whole_groups": whole_groups,
        "whole_batch": whole_batch,
        "balance": balance,
        "generates": generates,
        "sequence_parallel": sequence_parallel,
        "ignores": as_tuple(ignores),
        "optional": as_tuple(optional),
        "whole_rows": whole_rows,
    }
    for key in unknown:
        raise FlowError(f"@node has no option '{cut(key)}'{suggest(key, arguments)}")
    if fn is None:
        return functools.partial(node, **arguments)
    spec = replace(spec_of(fn), **{k: v for k, v in arguments.items() if v is not None})
    inner = inspect.unwrap(fn)

    @functools.wraps(inner)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if _nodes.get() is not None or any(isinstance(a, Value) for a in args):
            return _record(inner, spec, spec.id or inner.__name__, args, kwargs)
        return inner(*args, **kwargs)

    traced.__distflow__ = spec  # type: ignore[attr-defined]
    return traced


def spec_of(fn: Any) -> NodeSpec:
    """Returns the spec of a function marked with `@node`, or the default one."""
    spec = getattr(fn, "__distflow__", NodeSpec())
    assert isinstance(spec, NodeSpec)
    return spec


@dataclass(frozen=True, eq=False)
class Value:
    """A symbol for the fields that one node writes. Pass it to nodes, or select fields: `rollout["response"]`."""

    node: str
    fields: tuple[str, ...]

    def __getitem__(self, field: Names) -> "Value":
        if not isinstance(field, str | list | tuple) or not all(isinstance(f, str) for f in field):
            self._refuse(f"indexed by {field!r} (select fields by name)")
        selected = as_tuple(field) or ()
        for f in selected:
            if f not in self.fields:
                if self.node == SOURCE:
                    hint = suggest(f, self.fields)
                    raise FlowError(f"the data has no column '{f}'{hint} (data.rename gives a column another name)")
                raise FlowError(f"node '{self.node}' writes no field '{f}'{suggest(f, self.fields)}")
        return Value(self.node, selected)

    def _refuse(self, use: str) -> NoReturn:
        raise FlowError(
            f"the value of node '{self.node}' was {use}: a flow is traced once, on symbols, so its shape"
            " cannot depend on data. If this happened inside a function of yours, mark that function with @node"
        )

    def __iter__(self) -> NoReturn:  # defined, or Python would fall back to indexing
        self._refuse("iterated over")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        self._refuse(f"asked for its attribute '{name}' (select a field with [\"{name}\"])")


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
    """A function marked with `@flow`. `trace` binds its roles and returns the graph."""

    fn: Callable[..., Any]
    constants_of: Callable[..., Any] | None = None
    optional_roles: tuple[str, ...] = ()  # whose implementation is needed only if the flow calls them

    @property
    def roles(self) -> list[str]:
        """Returns the parameters after the data that have no default."""
        return [p.name for p in self._parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]

    @property
    def constants(self) -> dict[str, Any]:
        """Constant → default: of the parameters of this function and of `constants_of`."""
        shared = inspect.signature(self.constants_of).parameters.values() if self.constants_of else ()
        return {p.name: p.default for p in (*shared, *self._parameters[1:]) if p.default is not p.empty}

    def _typed_by(self, constant: str) -> Callable[..., Any]:
        """Returns the function whose parameter types a constant: `constants_of` if that alone has an annotation."""
        owners = [f for f in (self.fn, self.constants_of) if f and constant in inspect.signature(f).parameters]
        annotated = [
            f for f in owners if inspect.signature(f).parameters[constant].annotation is not inspect.Parameter.empty
        ]
        return (annotated or owners)[0]

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.fn).parameters.values())

    def trace(
        self,
        source: Iterable[str],
        roles: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> Flow:
        """Returns the graph. `source`: the data columns; `roles`: role → the function or class that implements it;
        `constants`: values for the parameters that have a default."""
        roles = dict(roles or {})
        name = self.fn.__name__
        if not self._parameters:
            raise FlowError(f"flow '{name}' takes no parameter; the first one must be the data")
        for c in constants or {}:
            if c not in self.constants:
                raise FlowError(f"algo: flow '{name}' has no constant '{cut(c)}'{suggest(c, self.constants)}")
        for c, value in (constants or {}).items():
            check_constant(self._typed_by(c), c, value, f"algo.{cut(c)}")
        for r in roles:
            if r not in self.roles:
                raise FlowError(f"flow '{name}' has no role '{cut(r)}'{suggest(r, self.roles)}")
        unbound = {p: _Unbound(name, p) for p in self.roles if p not in roles}
        if missing := [p for p in unbound if p not in self.optional_roles]:
            unbound[missing[0]]()
        columns = tuple(source)
        nodes: list[Node] = []
        token, outer = _nodes.set(nodes), _columns.set(columns)
        try:
            self.fn(
                Value(SOURCE, columns), **{p: _Role(p, r) for p, r in roles.items()}, **unbound, **(constants or {})
            )
        except Exception as e:
            message = str(e) if isinstance(e, FlowError) else f"flow '{name}': {type(e).__name__}: {e}"
            raise FlowError(message + _place(e, self.fn)) from e
        finally:
            _nodes.reset(token)
            _columns.reset(outer)
        return Flow(name, columns, tuple(nodes))


def flow(
    fn: Callable[..., Any] | None = None,
    *,
    constants_of: Callable[..., Any] | None = None,
    optional_roles: Names = (),
) -> Any:
    """Marks a function as a flow. Its first parameter is the data; the others are roles (functions or classes), or
    constants if they have a default.

    `constants_of` is a function to which the flow passes its `**rest`: its constants are those of the flow, too.
    `optional_roles` need an implementation only if the flow, with its constants, calls them.
    """
    if fn is None:
        return functools.partial(flow, constants_of=constants_of, optional_roles=optional_roles)
    return FlowFunction(fn, constants_of, as_tuple(optional_roles) or ())


def _place(error: Exception, fn: Callable[..., Any]) -> str:
    """Returns the line of the user's flow at which the error was raised."""
    if fn.__module__.startswith("distflow."):
        return ""
    file = fn.__code__.co_filename
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(file).name}:{lines[-1]})" if lines else ""


_nodes: ContextVar[list[Node] | None] = ContextVar("nodes", default=None)
_columns: ContextVar[tuple[str, ...]] = ContextVar("columns", default=())  # of the data


class _Unbound:
    """A role without an implementation: an error if it is used."""

    def __init__(self, flow: str, role: str) -> None:
        self._flow, self._role = flow, role

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FlowError(
            f"flow '{self._flow}': role '{self._role}' has no implementation; name one:"
            f" `roles: {{{self._role}: file.py:function}}`, or `{{model: …}}` for a model that is not trained"
        )

    def __getattr__(self, method: str) -> NoReturn:
        self()


class _Role:
    """A role inside a flow: a function is called directly, `reward(x)`, a class by its methods, `judge.score(x)`."""

    def __init__(self, role: str, target: Any) -> None:
        if not inspect.isclass(target) and not inspect.isfunction(target):
            kind = type(target).__name__
            raise FlowError(f"role '{role}' is bound to an object of type {kind}; name a function or a class")
        self._role, self._target = role, target

    def __call__(self, *args: Any, **kwargs: Any) -> Value:
        if inspect.isclass(self._target):
            methods = ", ".join(_methods(self._target))
            hint = f"call one of its methods: {methods}" if methods else "it has no methods to call"
            raise FlowError(f"role '{self._role}' is the class {reference(self._target)}; {hint}")
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
    others = [a for a in args if isinstance(a, _Role)]
    if others:  # actor.converse(prompts, environment): a role is a constant, its name
        args = tuple(a for a in args if not isinstance(a, _Role))
        kwargs |= {"environment": others[0]._role}
    spec = spec_of(fn).of_role(role)
    return _record(
        inspect.unwrap(fn), spec, spec.id or f"{role}.{method}", args, kwargs, {"role": role, "method": True}
    )


def method_of(role: str, cls: type, method: str, where: str) -> Callable[..., Any]:
    """Returns a method of the class that implements a role; `where` begins the error if there is none."""
    fn = getattr(cls, method, None)
    if not inspect.isfunction(fn):
        hint = suggest(method, _methods(cls))
        raise FlowError(f"{where}: role '{role}' ({reference(cls)}) has no method '{method}'{hint}")
    return fn


def _methods(cls: type) -> list[str]:
    hooks = getattr(cls, "__hooks__", ())  # of distflow.Role
    return [m for m in dir(cls) if inspect.isfunction(getattr(cls, m)) and not m.startswith("_") and m not in hooks]


def _record(
    fn: Callable[..., Any],
    spec: NodeSpec,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Value:
    """Adds the node of a call to the flow that is being traced; returns the symbol of its output."""
    nodes = _nodes.get()
    if nodes is None:
        raise FlowError(f"'{name}' was called on a symbol outside a flow")
    taken = {n.id for n in nodes}
    node_id = name
    for k in range(2, len(taken) + 3):
        if node_id not in taken:
            break
        node_id = f"{name}_{k}"
    # Arguments for the node, unless the function has a parameter of that name.
    own = inspect.signature(fn).parameters
    options = {k: kwargs.pop(k) for k in ("dynamic_sampling", "prefix") if k in kwargs and k not in own}
    after = kwargs.pop("after", ())
    after = list(after) if isinstance(after, list | tuple) else [after]
    for a in (*args, *after):
        if not isinstance(a, Value):
            raise FlowError(
                f"node '{node_id}': positional arguments and `after` are values of other nodes, not {shown(a)};"
                " pass constants by keyword"
            )
    written = {f for n in nodes for f in n.writes}
    reads = spec.select_reads((f for a in args for f in a.fields), _columns.get(), written, options.get("prefix", ""))
    # A value that was passed but not read still orders the nodes.
    order = [a.node for a in after] + [a.node for a in args if not set(reads) & set(a.fields)]
    order = [i for i in dict.fromkeys(order) if i != SOURCE]
    recorded = spec.node(node_id, fn, reads, after=tuple(order), params=kwargs, **options, **extra)
    nodes.append(recorded)
    return Value(node_id, recorded.writes)


def _check_constants(node_id: str, fn: Callable[..., Any], params: Mapping[str, Any], method: bool) -> None:
    """Raises unless constants are plain JSON values for parameters other than the batch and the context."""
    parameters = inspect.signature(fn).parameters
    known = [p for p in list(parameters)[1 + method :] if p != "ctx"]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in params.items():
        if isinstance(value, Value):
            raise FlowError(
                f"node '{node_id}': the value of '{value.node}' is passed as '{key}='; pass values by position"
            )
        if not isinstance(key, str):
            raise FlowError(f"node '{node_id}': the name of constant {shown(key)} must be a string")
        if key not in known and not open_ended:
            raise FlowError(f"node '{node_id}': {reference(fn)} has no parameter '{cut(key)}'{suggest(key, known)}")
        check_constant(fn, key, value, f"node '{node_id}': constant '{cut(key)}'")
