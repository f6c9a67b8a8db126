"""References by which workers import a script's functions and classes: `file.py:name` or `package.module:name`."""

import functools
import inspect
import sys
import sysconfig
from pathlib import Path
from typing import Any

from distflow.errors import FlowError, shown
from distflow.flow.importing import load
from distflow.flow.trace import FlowFunction

_TO_FILE = "write it to a file, in a notebook with `%%writefile mine.py` as the first line of its cell, and import that"


def object_reference(value: Any, where: str) -> str:
    """Returns the reference of a function, class or flow; raises, with the way out, if workers could not import it.

    A function of the script that is running is imported by the path of the script: its main part has to be under
    `if __name__ == "__main__":`, which is tried here.
    """
    target = value.fn if isinstance(value, FlowFunction) else value
    target = inspect.unwrap(target) if inspect.isfunction(target) else target
    if not inspect.isfunction(target) and not inspect.isclass(target):
        kind = "functools.partial" if isinstance(target, functools.partial) else type(target).__name__
        raise FlowError(
            f"{where}: {shown(value)} is a {kind}, which workers cannot import; give a function or class at the top"
            " level of a file, and constants as its `args`"
        )
    name = target.__qualname__
    if "<" in name:  # <lambda> or <locals>
        outer = name.partition(".")[0]
        problem = "a lambda, which" if name.endswith("<lambda>") else f"defined inside '{outer}', where"
        raise FlowError(
            f"{where}: {shown(name)} is {problem} workers cannot import; make it a function at the top level of a file,"
            " and give constants as its `args`"
        )
    module = sys.modules.get(target.__module__)
    file = getattr(module, "__file__", None)
    if target.__module__ == "__main__" and (file is None or not file.endswith(".py")):
        problem = "is defined in an interactive session, which workers cannot import"
        raise FlowError(f"{where}: '{name}' {problem}; {_TO_FILE}")
    by_file = target.__module__ == "__main__" or _is_script_module(target.__module__, file)
    reference = f"{Path(str(file)).resolve()}:{name}" if by_file else f"{target.__module__}:{name}"
    load(reference, where)
    return reference


def _is_script_module(name: str, file: str | None) -> bool:
    """Returns whether a module is a single file that is not installed: workers may have another path to import from."""
    installed = tuple(sysconfig.get_paths()[p] for p in ("purelib", "platlib", "stdlib"))
    return "." not in name and bool(file) and str(file).endswith(".py") and not str(file).startswith(installed)
