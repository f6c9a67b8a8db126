"""Dependencies point one way: every import in the package is read, lazy ones, those for types, and names in strings."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import distflow

SOURCE = Path(distflow.__file__).parent

# area → the areas that it may import, as words; an area is a package, or one of the modules named here
_BASE = "errors util"
_ALLOWED = {
    "errors": "",
    "util": "errors",
    "run_folder": _BASE,
    "reward.errors": _BASE,
    "sandbox": "",  # it runs untrusted code, and is read and used alone
    "flow": _BASE,
    "plan": f"flow {_BASE}",
    "rollout.registry": _BASE,
    "config.schema": f"rollout.registry {_BASE}",
    "config": f"config.schema {_BASE}",
    "device": f"plan config config.schema {_BASE}",
    "algo": _BASE,
    "batch": f"plan {_BASE}",
    "dataset": f"plan {_BASE}",
    "comm": f"batch plan {_BASE}",
    "coordinator": f"comm dataset batch flow plan {_BASE}",
    "flows": f"roles.role flow algo batch {_BASE}",
    "userproc": f"flow {_BASE}",
    "reward": f"roles.role reward.errors sandbox userproc flow batch run_folder {_BASE}",
    "weights": f"comm device plan {_BASE}",
    "roles.role": f"weights comm dataset plan config.schema {_BASE}",
    "cpu": _BASE,
    "model": f"cpu weights batch dataset plan config.schema {_BASE}",
    "cpu.modules": f"cpu model config.schema {_BASE}",
    "cpu.llama_forward": f"cpu model {_BASE}",
    "cpu.threaded_batches": f"cpu.llama_forward model {_BASE}",
    "roles.context": f"model plan config.schema {_BASE}",
    "train": f"cpu.modules cpu device roles.context model weights algo batch flow plan config.schema {_BASE}",
    "rollout": "rollout.registry cpu.llama_forward cpu.modules cpu.threaded_batches cpu device model weights batch plan"
    f" config.schema {_BASE}",
    "roles": "train rollout device roles.context roles.role model weights comm batch dataset algo flow plan"
    f" config.schema {_BASE}",
    "agents": "sandbox reward userproc roles rollout roles.context roles.role model dataset batch plan flow"
    f" config.schema {_BASE} distflow",
    "liveness": f"comm device plan {_BASE} distflow",
    "cluster": f"liveness device comm run_folder plan flow config {_BASE}",
    "checkpoint": f"comm roles.context model weights run_folder plan {_BASE}",
    "observe": f"coordinator comm batch run_folder plan {_BASE}",
    "page": f"observe run_folder plan config config.schema {_BASE}",
    "run": "device observe checkpoint cluster liveness agents reward roles train rollout roles.context roles.role model"
    f" weights coordinator comm dataset batch flows flow plan config config.schema run_folder {_BASE}",
    "simulate": f"run device observe weights comm plan flow config config.schema run_folder {_BASE}",
    "rehearsal": "run cluster observe device roles train rollout weights model algo batch comm plan config"
    f" config.schema {_BASE}",
    "first_hour": "rehearsal simulate run cluster liveness device train rollout model comm plan config"
    f" config.schema run_folder {_BASE}",
    "api": f"first_hour run device checkpoint cluster observe plan flow config {_BASE}",
    "cli": f"api first_hour simulate rehearsal page run observe plan config run_folder {_BASE} distflow",
    "distflow": "api run roles.role flow plan algo batch util",  # the package's own names
    "__main__": "cli util",
}
ALLOWED = {area: set(names.split()) for area, names in _ALLOWED.items()}


def area(module: str) -> str:
    """The area of a dotted name in the package."""
    parts = module.removeprefix("distflow").lstrip(".").split(".")
    if not parts[0]:
        return "distflow"
    return ".".join(parts[:2]) if ".".join(parts[:2]) in ALLOWED else parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of whatever of the package a file imports or names in a string, but for entry points."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [m for m in [node.value.partition(":")[0]] if re.fullmatch(r"distflow(\.\w+)+", m) and is_module(m)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "distflow")


def is_module(name: str) -> bool:
    """Returns whether a dotted name begins with a module of the package; groups of entry points do not."""
    path = SOURCE / name.split(".")[1]
    return path.is_dir() or path.with_suffix(".py").exists()


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
        ("ROLES = 'distflow.roles.actor:Actor'\n", "distflow.roles.actor"),
    ],
)
def test_lazy_imports_and_names_in_strings_are_seen(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(text)
    assert [n for _, n in imports(tmp_path / "m.py")] == [name]


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest takes two files of one name for the same module."""
    names = Counter(p.name for p in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
