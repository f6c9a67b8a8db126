"""Imports a user's function or class: `package.module:name` or `path/to/file.py:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from distflow.errors import FlowError, cut, describe_error, suggest

_modules: dict[Path, ModuleType] = {}
_FILE = "__distflow_file__"  # set in modules that were loaded from a file
_loading: list[Path] = []  # files that are being loaded at this moment


def load(ref: str, where: str, base: Path | None = None) -> Any:
    """Returns the object that `ref` names. Errors begin with `where`; relative paths start at `base`."""
    target, colon, name = ref.rpartition(":")
    if not colon or not target or not name:
        raise FlowError(f"{where}: '{cut(ref)}' is not 'package.module:name' or 'path/to/file.py:name'")
    result: Any = (
        _from_file(Path(base or ".") / target, ref, where) if target.endswith(".py") else _import(target, ref, where)
    )
    for part in name.split("."):
        if not hasattr(result, part):
            names = [n for n in vars(result) if not n.startswith("_")] if hasattr(result, "__dict__") else []
            raise FlowError(f"{where}: '{cut(ref)}' has no '{cut(part)}'{suggest(part, names)}")
        result = getattr(result, part)
    return result


def reference(fn: Any) -> str:
    """Returns a function's reference for the plan: the same on every host, wherever the file is."""
    file = getattr(sys.modules.get(fn.__module__), _FILE, None)
    return f"{file or fn.__module__}:{fn.__qualname__}"


def loaded_files() -> list[Path]:
    """Returns the files that were loaded so far for a config."""
    return list(_modules)


def refuse_while_loading(what: str) -> None:
    """Raises if called during the import of a file: the main part of a script would run again in every worker."""
    if _loading:
        raise FlowError(
            f"{_loading[-1].name} calls {what} when it is imported, as every worker does; put the call under"
            ' `if __name__ == "__main__":`'
        )


def _import(name: str, ref: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        raise FlowError(
            f"{where}: '{cut(ref)}' does not import: {describe_error(e)}; check the name and that it is installed"
        ) from e


def _from_file(path: Path, ref: str, where: str) -> ModuleType:
    path = path.resolve()
    if path in _modules:
        return _modules[path]
    if not path.is_file():
        raise FlowError(f"{where}: '{cut(ref)}' does not import: there is no file {cut(str(path), 300)}")
    name = f"distflow_file_{len(_modules)}_{path.stem}"  # never shadows an installed module of the same name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # so that the file can import its neighbours, like a script
        sys.path.append(str(path.parent))
    setattr(module, _FILE, path.name)
    sys.modules[name] = module
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise FlowError(f"{where}: '{cut(ref)}' does not import: {describe_error(e)}") from e
    finally:
        _loading.remove(path)
    _modules[path] = module
    return module
