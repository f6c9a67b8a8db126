"""Decides, from the text of tests alone, which names they take from the solution: the functions that they test.

A helper that tests use without importing it is the judge's; a solution that defines it, too, has no say. Where only the
solution could decide, the data are in error.
"""

import ast
import builtins
import importlib
import symtable
from collections.abc import Collection, Iterator, Sequence
from functools import cache

# Modules that tests use without an import, since the solution that they were written for has it.
_MODULES = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io",
    "itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing",
    "unittest",
)  # fmt: skip
_ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
# Of these, also single functions and classes.
_OPENED = (
    "math",
    "collections",
    "itertools",
    "functools",
    "fractions",
    "decimal",
    "datetime",
    "copy",
    "typing",
    "statistics",
)
# Fixtures of pytest and its plugins; a parameter of any other name may be what the tests call the function by.
_FIXTURES = {
    "caplog", "capfd", "capsysbinary", "mocker", "monkeypatch", "recwarn", "request", "tmp_path", "tmp_path_factory",
    "tmpdir",
}  # fmt: skip
_FILES = {
    "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "makedirs", "mkdir", "mkdtemp", "mkstemp",
    "read_bytes", "read_text", "write_bytes", "write_text",
}  # fmt: skip
_RUN_DATA = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "ctypes", "subprocess"}

Flow = dict[str, set[str]]


def parse_python(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def solution_names(setup: str, tests: Sequence[str], entry: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Returns the names that tests take from the solution, and the imports that they lack.

    `entry` are the names that the row declares. Without them, a name that the tests use but do not define is the
    solution's, unless it is a helper.
    """
    text = "\n".join([setup, *tests])
    try:
        table, tree = symtable.symtable(text, "tests", "exec"), ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ValueError(f"the tests are not valid Python: {e}; fix the row") from e
    _check_harmless(tree)
    _check_runnable(tree)
    undefined = _undefined(table) - set(entry)
    uses = _Uses(tree, undefined)
    helpers = {name: module for name in undefined if (module := _helper(name, uses, bool(entry)))}
    if not entry:
        _check_unambiguous(tree, uses, helpers.keys())
    own = sorted(undefined - helpers.keys())
    if entry:
        if own:
            raise ValueError(
                f"the tests use '{own[0]}', which they do not define, and which is not the entry point"
                f" '{', '.join(entry)}'; define it in `setup`, or add it to a list `entry_point`"
            )
        own = list(entry)
    else:
        uses.check_verdicts(set(own))
    if not own and "solution" not in uses.imported:
        raise ValueError(
            "the tests ask the solution nothing: they use no name that they do not define; call the function that is"
            " tested, or name it as `entry_point` of the row"
        )
    return tuple(own), "\n".join(_import(name, module) for name, module in sorted(helpers.items()))


def _check_harmless(tree: ast.Module) -> None:
    """Refuses tests that could run what the solution returns: the judge must not."""
    modules = {name.partition(".")[0] for name in _imported(tree)} & _RUN_DATA
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for used in sorted(modules | names & {"exec", "compile", "__import__"}):
        raise ValueError(f"the tests use '{used}', with which they could run what the solution returns; fix the row")


def _check_runnable(tree: ast.Module) -> None:
    """Refuses tests that need what only one process could give them, or a fixture that is not there."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open")):
                _refuse("open files", "the solution does not see them")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="sqlite3"), attr="connect"), args=[name, *_]) if (
                not isinstance(name, ast.Constant) or name.value != ":memory:"
            ):
                _refuse("open a database", "the solution does not see files of theirs")
            case ast.Attribute(value=ast.Name(id="os"), attr="remove" | "unlink"):
                _refuse("remove files", "the solution does not see files of theirs")
            case ast.Attribute(attr=name) if name in _FILES:
                _refuse(f"use '{name}'", "the solution does not see files of theirs")
            case ast.Call(func=ast.Name(id="patch") | ast.Attribute(attr="patch"), args=[ast.Constant(value=name), *_]):
                if name != "sys.stdout":
                    _refuse(f"patch {name!r}", "the solution runs in another process")
            case ast.Attribute(value=ast.Name(id="patch") | ast.Attribute(attr="patch"), attr="object" | "dict"):
                _refuse("patch objects", "the solution runs in another process")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="sys"), attr="stdin")]):
                _refuse("replace sys.stdin", "the solution has its own; use cases of {input, output}")
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and "fixture" in _decorators(n)}
    cases = {id(m) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.bases for m in n.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            needed = {a.arg for a in node.args.args[: len(node.args.args) - len(node.args.defaults)]} - {"self"}
            unknown = sorted(needed & _FIXTURES - defined - set(_decorators(node).replace(",", " ").split("'")))
            if unknown and id(node) not in cases:
                _refuse(f"use the fixture '{unknown[0]}'", "there are `capsys` and those that the tests define")


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def _refuse(what: str, why: str) -> None:
    raise ValueError(f"the tests {what}: {why}; remove the row, or rewrite its tests")


def shared_classes(setup: str, names: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Returns the classes of a setup that both sides have, and the code that defines them.

    Such a class only holds data: all its methods are special ones, as those of a node of a list. Any other may know
    answers, so the solution gets no more of it than its name.
    """
    body = ast.parse(setup).body
    classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name not in names and _holds_data(n)]
    imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)] if classes else []
    return tuple(c.name for c in classes), "\n".join(map(ast.unparse, [*imports, *classes]))


def _holds_data(node: ast.ClassDef) -> bool:
    methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return all(name.startswith("__") for name in methods)


def split_tests(tests: Sequence[str], names: Sequence[str]) -> list[str]:
    """Joins an entry that names nothing of the solution's, such as an import, with the next one that does."""
    joined: list[str] = []
    waiting: list[str] = []
    for test in tests:
        waiting.append(test)
        words = {n.id for n in ast.walk(ast.parse(test)) if isinstance(n, ast.Name)}
        if words & {*names} or "solution" in _imported(ast.parse(test)) or _defines_tests(test):
            joined.append("\n".join(waiting))
            waiting = []
    if waiting and joined:
        joined[-1] = "\n".join([joined[-1], *waiting])
    return joined or ["\n".join(waiting)]


def _defines_tests(test: str) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in ast.parse(test).body)


class _Uses:
    """The uses of names that the tests do not define."""

    def __init__(self, tree: ast.Module, undefined: set[str]) -> None:
        self.tree, self.undefined = tree, undefined
        nodes = list(ast.walk(tree))
        self.called = {call[0] for n in nodes if (call := _call(n))} & undefined
        self.opened = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
        self.imported = _imported(tree)
        self._flow = self._trace(nodes)
        self.outer = {name for name in self.called if self._feeding(name)}

    def _trace(self, nodes: list[ast.AST]) -> Flow:
        """Returns, for each variable, the undefined names whose results may be in it."""
        flow: Flow = {}
        pairs = [(target, value) for node in nodes for target, value in _assignments(node)]
        changed = True
        while changed:
            changed = False
            for target, value in pairs:
                sources = self._sources(value, flow)
                for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
                    changed |= not sources <= flow.setdefault(name, set())
                    flow[name] |= sources
        return flow

    def _sources(self, node: ast.AST, flow: Flow) -> set[str]:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return (names & self.undefined).union(*(flow.get(n, set()) for n in names))

    def sources(self, node: ast.AST) -> set[str]:
        """Returns the undefined names whose results are in an expression."""
        return self._sources(node, self._flow)

    def _feeding(self, name: str) -> set[str]:
        """Returns the other functions whose results reach the arguments of calls of `name`."""
        calls = [call for n in ast.walk(self.tree) if (call := _call(n)) and call[0] == name]
        arguments = [a for call in calls for a in call[1]]
        found = set[str]().union(*(self._sources(a, self._flow) for a in arguments))
        return {n for n in found - {name} if n in self.called and not n[0].isupper()}

    def check_verdicts(self, own: set[str]) -> None:
        """Refuses tests in which the solution would judge itself."""
        for name in sorted(own):
            if not self._may_be_function(name):
                raise ValueError(f"the tests use '{name}', which they do not define; define it in `setup`")
        for expression in _verdicts(self.tree):
            for name in [call[0] for n in _operands(expression) if (call := _call(n)) and call[0] in own]:
                if others := self._feeding(name) & own:
                    raise ValueError(
                        f"the tests let the solution's own {name}() decide about {sorted(others)[0]}(); define it in"
                        f" `setup`, or declare both in a list `entry_point`"
                    )
            if isinstance(expression, ast.Compare) and len(expression.comparators) == 1:
                left, right = (
                    self._sources(side, self._flow) & own & self.called
                    for side in (expression.left, expression.comparators[0])
                )
                if left and right and left != right:
                    raise ValueError(
                        f"the tests compare {sorted(left)[0]}() with {sorted(right)[0]}(), which are both the"
                        " solution's; define one of them in `setup`, or declare both in a list `entry_point`"
                    )

    def _may_be_function(self, name: str) -> bool:
        """Returns whether a name is called, passed on or opened somewhere, and not only compared and computed with."""
        operands = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare | ast.BinOp | ast.UnaryOp | ast.Subscript):
                operands |= {id(n) for n in ast.iter_child_nodes(node)}
        uses = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == name]
        return not all(id(n) in operands for n in uses)


def _helper(name: str, uses: _Uses, declared: bool) -> str:
    """Returns the module that a helper is from, empty if the name is the solution's."""
    if name in uses.opened and name not in uses.called and (name in _MODULES or name in _ALIASES):
        return name
    module = _openings().get(name, "")
    others = {n for n in uses.called - {name} if n not in _openings()}
    return module if declared or others or name in uses.outer or name not in uses.called else ""


def _check_unambiguous(tree: ast.Module, uses: _Uses, helpers: Collection[str]) -> None:
    """Refuses a test of nothing but a helper: it would be that of the standard library, not the solution's."""
    for verdict in _verdicts(tree):
        called = {call[0] for n in ast.walk(verdict) if (call := _call(n))} & uses.undefined
        alone = called and called <= set(helpers) and not uses.sources(verdict) - set(helpers)
        for name in sorted(called) if alone else ():
            raise ValueError(
                f"the tests ask {name}() alone, which may be the solution's or that of `{_openings()[name]}`; import it"
                " in `setup`, or declare the names of the solution in a list `entry_point`"
            )


def _import(name: str, module: str) -> str:
    """Returns the import of a helper; without the package, tests that use it fail with an error that names it."""
    if name == module:
        return f"import {_ALIASES.get(name, name)} as {name}"
    return f"from {module} import {name}"


@cache
def _openings() -> dict[str, str]:
    """Returns the module of each function and class that tests may use without an import."""
    return {
        name: module
        for module in reversed(_OPENED)
        for name in getattr(importlib.import_module(module), "__all__", None) or dir(importlib.import_module(module))
        if not name.startswith("_") and not hasattr(builtins, name)
    }


def _undefined(table: symtable.SymbolTable) -> set[str]:
    symbols = table.get_symbols()
    defined = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return _global_names(table) - defined - set(dir(builtins)) - {"__file__"}


def _global_names(table: symtable.SymbolTable) -> set[str]:
    names = {s.get_name() for s in table.get_symbols() if s.is_global() or table.get_type() == "module"}
    return names.union(*map(_global_names, table.get_children()))


def _imported(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields (target, value) wherever a value gets a name."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value
        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
            yield target, value


def _verdicts(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions whose truth decides, without `not`, `and` and `or` around them."""
    pending = [n.test for n in ast.walk(tree) if isinstance(n, ast.Assert | ast.If | ast.While | ast.IfExp)]
    pending += [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_assertion(n.func)]
    while pending:
        match node := pending.pop():
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                pending.append(operand)
            case ast.BoolOp(values=values):
                pending.extend(values)
            case _:
                yield node


def _is_assertion(function: ast.expr) -> bool:
    """Returns whether it is a method of unittest, such as `self.assertEqual`."""
    return isinstance(function, ast.Attribute) and function.attr.startswith("assert")


def _operands(verdict: ast.expr) -> list[ast.expr]:
    """Returns the parts whose truth is the verdict: itself, or what is compared with True or False."""
    if isinstance(verdict, ast.Compare):
        sides = [verdict.left, *verdict.comparators]
        constant = any(isinstance(s, ast.Constant) and isinstance(s.value, bool) for s in sides)
        return sides if constant else []
    if isinstance(verdict, ast.Call):  # all(…), any(…), bool(…)
        return [verdict, *(a.elt if isinstance(a, ast.GeneratorExp | ast.ListComp) else a for a in verdict.args)]
    return [verdict]


def _call(node: ast.AST) -> tuple[str, list[ast.expr]] | None:
    """Returns the name and the arguments of a call of a plain name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id, [*node.args, *(k.value for k in node.keywords)]
    return None
