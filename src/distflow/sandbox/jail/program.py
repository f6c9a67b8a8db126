"""Executes a program in a process that is isolated already, and ends that process as the interpreter would."""

import atexit
import builtins
import importlib
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable

from distflow.sandbox.jail import MEMORY_EXIT_CODE

_RECURSION = 50_000
_MODULES = (
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools", "json", "math", "operator",
    "os", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
_NAMES_OF = ("typing", "operator", "statistics", "random", "string", "copy", "bisect", "heapq", "datetime", "functools",
             "collections", "itertools", "math")  # fmt: skip


def _imported() -> dict[str, object]:
    """Returns the names that harnesses of public data sets import for programs.

    As builtins, they are no names of a program: one that does not define what the tests call does not have it.
    """
    found: dict[str, object] = {}
    for module in map(importlib.import_module, _NAMES_OF):
        names = getattr(module, "__all__", None) or dir(module)
        found |= {n: getattr(module, n) for n in names if n[0] != "_" and not hasattr(builtins, n)}
    return found | {name: importlib.import_module(name) for name in _MODULES}


_IMPORTED = _imported()


def run_and_exit(program: Callable[[], None]) -> None:
    """Runs a program and exits as the interpreter would; does not return."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if not isinstance(e.code, int | None):
            print(e.code, file=sys.stderr)
    except MemoryError:
        code = MEMORY_EXIT_CODE
    except BaseException as e:
        frame = e.__traceback__  # without the three frames of the jail
        for _ in range(3):
            frame = frame and frame.tb_next
        traceback.print_exception(type(e), e, frame)
    finally:
        code = _shut_down(code)
        os._exit(code & 0xFF)


def _shut_down(code: int) -> int:
    """Joins threads, runs `atexit` functions and flushes the streams; returns the exit code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # for instance a full disk, or a stream that the program has closed
        return code or 1
    return code


def execute(source: bytes) -> None:
    """Runs a program with what harnesses of such programs give: common imports, deep recursion, long numbers."""
    sys.setrecursionlimit(_RECURSION)
    sys.set_int_max_str_digits(0)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` adds them, which the jail does not import
    vars(builtins).update(_IMPORTED)
    exec(compile(source, "program.py", "exec"), main.__dict__)  # the untrusted program
