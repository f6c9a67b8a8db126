"""Imports an environment and finds the adapter for it by its names and methods; no framework has to be installed."""

import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment, adapter_of, adapters
from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.errors import DistflowError, shown
from distflow.flow.importing import load
from distflow.userproc.server_process import describe_exit


def load_environment(spec: EnvironmentSpec, base: Path) -> LoadedEnvironment:
    """Imports what a spec names; errors name the environment and the way out."""
    from distflow.agents.adapters.verl_tools import as_tools

    tools = [t for ref in spec.tools for t in as_tools(load(ref, spec.where, base), spec.where, spec.args)]
    target, kind = _load_target(spec, base)
    kind = spec.kind if spec.kind != "auto" else kind or detect(target, spec)
    adapter = adapter_of(kind, spec.where)
    if kind == "tools" and target is not None:
        tools, target = tools + as_tools(target, spec.where, spec.args), None
    _check_takes_tools(spec, kind, adapter)
    if spec.mcp:
        from distflow.agents.adapters.mcp_tools import check_installed

        check_installed(spec)
    adapter.prepare()
    return LoadedEnvironment(spec, target, adapter, tools, base=base)


def _check_takes_tools(spec: EnvironmentSpec, kind: str, adapter: EnvironmentAdapter) -> None:
    """Raises if tools are given beside an environment that would never offer them to the model."""
    for name, given in (("tools", spec.tools), ("mcp", spec.mcp)):
        if given and name not in adapter.takes:
            kinds = ", ".join(f"'{k}'" for k, other in sorted(adapters()) if name in other.takes)
            raise EnvironmentSetupError(
                f"{spec.where}: `{name}` is for environments of the kinds {kinds}, and this is of '{kind}'; remove it"
            )


def _load_target(spec: EnvironmentSpec, base: Path) -> tuple[Any, str | None]:
    """Returns what `call` names and, if `call` itself says so, its kind: some packages have registries of names."""
    if not spec.call:
        return None, None
    package, _, name = spec.call.partition(":")
    for kind, adapter in adapters():
        if package and package == adapter.package and (target := adapter.by_name(name, spec.where)) is not None:
            return target, kind
    return load(spec.call, spec.where, base), None


def describe_all(environments: Sequence[LoadedEnvironment]) -> None:
    """Describes environments in a process that ends thereafter: what describing them imports, and the objects it
    makes, would slow down every later fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer: Any = [asdict(e.adapter.describe(e)) for e in environments]
            except DistflowError as e:
                answer = str(e)
            with open(writing, "w") as file:
                json.dump(answer, file)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if status or not text:
        names = ", ".join(e.spec.where for e in environments)
        how = describe_exit(os.waitstatus_to_exitcode(status))
        raise EnvironmentSetupError(f"{names}: the process that looked at its methods {how}; see its stderr")
    answer = json.loads(text)
    if isinstance(answer, str):
        raise EnvironmentSetupError(answer)
    for environment, fields in zip(environments, answer, strict=True):
        environment.description = Description.of(fields)


def detect(target: Any, spec: EnvironmentSpec) -> str:
    """Returns the kind of an object."""
    if spec.command:
        return "program"
    if target is None:
        return "tools"
    for kind, adapter in adapters():
        if adapter.matches(target):
            return kind
    known = ", ".join(adapter.what for _, adapter in reversed(list(adapters())))
    raise EnvironmentSetupError(
        f"{spec.where}: {shown(target, 60)} is no environment that DistFlow knows: {known}; set `environment.kind` if"
        " it is one of these all the same"
    )
