"""Rewrites tests before they run: what they change at the solution's side, which tests ran, what is compared how.

The tests are a data set's, not the solution's. The names that this adds begin with `_judge_`.
"""

import ast
from collections.abc import Collection, Iterator

# Methods that change the data that they are called on.
MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "push",
    "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OPERATIONS = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Sub: "sub",
    ast.Add: "add", ast.Mult: "mul", ast.Div: "truediv",
}  # fmt: skip


def rewrite(code: str, names: Collection[str], arrays: bool) -> ast.Module:
    """Returns the tree of tests that take `names` from the solution; with `arrays`, they may use numpy."""
    tree = ast.parse(code)
    rewritten: ast.Module = _Rewriter(_changing_calls(tree, names), arrays).visit(tree)
    return ast.fix_missing_locations(rewritten)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, changing: Collection[ast.Call], arrays: bool) -> None:
        self._changing, self._arrays, self._depth = set(map(id, changing)), arrays, 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        changes = id(node) in self._changing
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="type"), args=[_], keywords=[]):
                node.func = _name("_judge_type_of")
            case _ if changes:
                node.func = _call("_judge_changing", node.func)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        function = {"__class__": "_judge_type_of", "__doc__": "_judge_doc_of"}.get(node.attr)
        return _call(function, node.value) if function and isinstance(node.ctx, ast.Load) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._arrays and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
            return self._operate(node.ops[0], node.left, node.comparators[0])
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self._operate(node.op, node.left, node.right) if self._arrays and type(node.op) in _OPERATIONS else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._edit(node, node.value)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._edit(node, node.targets[0])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self._edit(node, node.target)

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return self._edit(node, node.targets[0])

    def _edit(self, node: ast.stmt, changed: ast.expr) -> ast.AST:
        """Has a statement that changes the data of an attribute change them where the attribute is.

        `x.data[k].append(v)` becomes `with _judge_edit(x, "data") as _judge_data: _judge_data[k].append(v)`.
        """
        self.generic_visit(node)
        match changed:
            case ast.Call(func=ast.Attribute(value=inner, attr=method) as parent) if method in MUTATORS:
                pass
            case ast.Subscript(value=inner) as parent:
                pass
            case _:
                return node
        while isinstance(inner, ast.Subscript):
            parent, inner = inner, inner.value
        if not isinstance(inner, ast.Attribute) or inner.attr.startswith("__"):
            return node
        parent.value = _name("_judge_data")
        edit = _call("_judge_edit", inner.value, ast.Constant(inner.attr))
        return ast.With([ast.withitem(edit, ast.Name("_judge_data", ast.Store()))], [node])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._mark(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._mark(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def _mark(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        """Notes that a function of the module ran."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        if not self._depth and is_test(node.name):
            node.body.insert(0, ast.Expr(_call("_judge_ran", ast.Constant(node.name))))
        return node

    def _operate(self, operation: ast.AST, left: ast.expr, right: ast.expr) -> ast.AST:
        return _call("_judge_operate", ast.Constant(_OPERATIONS[type(operation)]), left, right)


def is_test(name: str) -> bool:
    return name.startswith("test") or name == "check"


def _changing_calls(tree: ast.Module, names: Collection[str]) -> list[ast.Call]:
    """Returns the calls whose arguments the tests want changed.

    They make no use of the result, or only ask whether it is None, and look at the argument afterwards: without
    comparing it with anything of the solution's, which would be an expectation that the solution could change.
    """
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for scope in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))]:
        nodes = list(_own_nodes(scope))
        calls = [n for n in nodes if isinstance(n, ast.Call) and _is_unused(n, nodes, parents)]
        if not calls:
            continue
        solution = _derived(scope, nodes, names)
        found += [c for c in calls if any(_is_observed(k, c, nodes, solution, parents) for k in _roots(c))]
    return found


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function or module without those of the functions in it."""
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending.extend(ast.iter_child_nodes(node))


def _is_unused(call: ast.AST, nodes: list[ast.AST], parents: dict[int, ast.AST]) -> bool:
    match parents[id(call)]:
        case ast.Expr():
            return True
        case ast.Await() as outer:
            return _is_unused(outer, nodes, parents)
        case ast.Compare(ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Attribute(attr="assertIsNone")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            reads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
            return all(isinstance(parents[id(n)], ast.Compare | ast.Call) and _is_unused(n, [], parents) for n in reads)
    return False


def _derived(scope: ast.AST, nodes: list[ast.AST], names: Collection[str]) -> set[str]:
    """Returns the solution's names, and the variables that hold its answers."""
    solution = {*names, "candidate", "solution", "Solution"}
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        parameters = {a.arg for a in ast.walk(scope.args) if isinstance(a, ast.arg)}
        solution |= {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & parameters
    pairs = [(t, n.value) for n in nodes if isinstance(n, ast.Assign) for t in n.targets]
    pairs += [(n.target, n.iter) for n in nodes if isinstance(n, ast.For)]
    pairs += [(n.optional_vars, n.context_expr) for n in nodes if isinstance(n, ast.withitem) and n.optional_vars]
    known = -1
    while known != len(solution):
        known = len(solution)
        for target, value in pairs:
            if _keys(value) & solution:
                solution |= _keys(target)
    return solution


def _is_observed(
    key: str, call: ast.Call, nodes: list[ast.AST], solution: set[str], parents: dict[int, ast.AST]
) -> bool:
    """Returns whether the tests look at an argument after a call, and never beside something of the solution's."""
    inside = set(map(id, ast.walk(call)))
    seen = False
    for node in nodes:
        after = id(node) not in inside and _key(node) == key and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]
        if not after or (node.lineno, node.col_offset) < (call.lineno, call.col_offset):  # type: ignore[attr-defined]
            continue
        seen = True
        unit, argument = node, False
        while isinstance(parents[id(unit)], ast.expr | ast.keyword | ast.comprehension) and not isinstance(
            parents[id(unit)], ast.BoolOp
        ):
            unit = parents[id(unit)]
            argument |= isinstance(unit, ast.Call) and bool(_keys(unit.func) & solution)
        if not argument and (_keys(unit) - {key}) & solution:
            return False
    return seen


def _roots(call: ast.Call) -> set[str]:
    """Returns the variables that are arguments, or of which parts are."""
    roots = set()
    for value in [*call.args, *(k.value for k in call.keywords)]:
        while isinstance(value, ast.Starred | ast.Subscript | ast.Attribute) and not _key(value):
            value = value.value
        roots.add(_key(value))
    return roots - {""}


def _keys(node: ast.AST) -> set[str]:
    return {key for n in ast.walk(node) if (key := _key(n))}


def _key(node: ast.AST) -> str:
    """Returns the name of a variable, or `self.name`; else an empty text."""
    match node:
        case ast.Name(id=name) if name != "self":
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
    return ""


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_name(function), list(arguments), [])
