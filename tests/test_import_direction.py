"""Dependencies point one way: every import in the package is read, lazy ones, those for types, and names in strings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distflow

SOURCE = Path(distflow.__file__).parent

# area → the areas that it may import, as words; an area is a package, a part of the engine, or a module
_ALLOWED = {
    "errors": "",
    "private_folder": "",
    "flow": "errors",
    "plan": "flow errors",
    "config.schema": "errors",
    "config": "config.schema errors",
    "algo": "errors",
    "data": "flow plan private_folder errors",
    "flows": "flow algo data errors",
    "reward": "flow data errors",
    "engine.base": "data plan errors",  # weights, columns, role_state
    "engine.model": "engine.base data plan config.schema errors",
    "engine.role_context": "engine.model plan config.schema errors",
    "engine.cpu": "engine.model data errors",
    "engine.train": "engine.cpu engine.role_context engine.model engine.base algo data flow plan config.schema errors",
    "engine.rollout": "engine.cpu engine.model engine.base data plan config.schema errors",
    "engine": "engine.train engine.rollout engine.role_context engine.model engine.base"
    " data flow plan config.schema errors",
    "environments": "reward engine engine.train engine.rollout engine.role_context engine.model engine.base"
    " data flow plan config.schema private_folder errors distflow",
    "observe": "data plan errors distflow",
    "run": "environments observe reward engine engine.train engine.role_context engine.model engine.base"
    " flows data plan flow config config.schema private_folder errors",
    "launch": "run observe data plan config private_folder errors distflow",
    "simulate": "run observe engine.base data plan flow config config.schema errors",
    "api": "launch run observe plan flow config errors",
    "cli": "simulate launch run observe plan config errors distflow",
    "distflow": "api run flow plan algo data",  # the package's own names
    "__main__": "cli",
}
ALLOWED = {area: set(names.split()) for area, names in _ALLOWED.items()}
BASE = {"engine.weights", "engine.columns", "engine.role_state"}


def area(module: str) -> str:
    """The area of a dotted name in the package."""
    parts = module.removeprefix("distflow").lstrip(".").split(".")
    if not parts[0]:
        return "distflow"
    if ".".join(parts[:2]) in BASE:
        return "engine.base"
    if parts[0] == "engine" and len(parts) > 1 and f"engine.{parts[1]}" in ALLOWED:
        return f"engine.{parts[1]}"
    return "config.schema" if parts[:2] == ["config", "schema"] else parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of whatever of the package a file imports or names in a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [m for m in [node.value.partition(":")[0]] if re.fullmatch(r"distflow(\.\w+)+", m)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "distflow")


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(["distflow", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def test_every_import_points_down() -> None:
    wrong = []
    for path in modules():
        own = area(dotted(path))
        assert own in ALLOWED, f"{path}: say in ALLOWED what '{own}' may import"
        for line, name in imports(path):
            if area(name) not in ALLOWED[own] | {own}:
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {own} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_allowed_directions_have_no_cycle() -> None:
    done: set[str] = set()
    while left := [a for a in ALLOWED if a not in done and a != "distflow"]:
        ready = [a for a in left if ALLOWED[a] - {"distflow"} <= done]
        assert ready, f"a cycle among {left}"
        done.update(ready)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def f():\n    from distflow.run import worker\n", "distflow.run.worker"),
        ("if TYPE_CHECKING:\n    import distflow.run.job\n", "distflow.run.job"),
        ("ROLES = 'distflow.engine.roles:Actor'\n", "distflow.engine.roles"),
    ],
)
def test_lazy_imports_and_names_in_strings_are_seen(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(text)
    assert [n for _, n in imports(tmp_path / "m.py")] == [name]
