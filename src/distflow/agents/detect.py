"""Imports an environment and finds the adapter for it by its names and methods; no framework has to be installed."""

import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from distflow.agents.loaded import Loaded
from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.errors import DistflowError, shown, suggest
from distflow.flow.importing import load
from distflow.userproc.server_process import describe_exit

_KNOWN = (
    "a TRL environment (class with `reset` whose public methods are tools, or a dict of such), a list of tools, a"
    " skyrl-gym BaseTextEnv (`init`, `step`), a verl BaseTool or AgentLoopBase, an OpenRLHF AgentInstanceBase, an"
    " OpenEnv client, a verifiers taskset or environment, or an agent `fn(base_url, api_key, row)`"
)
# kind → module of its adapter
_ADAPTERS = {
    "trl": "trl",
    "tools": "trl",
    "skyrl": "skyrl",
    "verl_loop": "verl_loop",
    "openrlhf": "openrlhf",
    "openenv": "openenv",
    "reasoning_gym": "reasoning_gym",
    "verifiers": "verifiers",
    "program": "program",
}

_TAKE_MCP = ("trl", "tools")
_TAKE_TOOLS = (*_TAKE_MCP, "verl_loop")


def load_environment(spec: EnvironmentSpec, base: Path) -> Loaded:
    """Imports what a spec names; errors name the environment and the way out."""
    from distflow.agents.adapters.verl_tools import as_tools

    tools = [t for ref in spec.tools for t in as_tools(load(ref, spec.where, base), spec.where, spec.args)]
    target, kind = _load_target(spec, base)
    kind = spec.kind if spec.kind != "auto" else kind or detect(target, spec)
    if kind not in _ADAPTERS:
        raise EnvironmentSetupError(f"{spec.where}: kind '{kind}' is not known{suggest(kind, _ADAPTERS)}")
    if kind == "tools" and target is not None:
        tools, target = tools + as_tools(target, spec.where, spec.args), None
    _check_takes_tools(spec, kind)
    if spec.mcp:
        from distflow.agents.adapters.mcp_tools import check_installed

        check_installed(spec)
    adapter = importlib.import_module(f"distflow.agents.adapters.{_ADAPTERS[kind]}")
    return Loaded(spec, target, adapter, tools, base=base)


def _check_takes_tools(spec: EnvironmentSpec, kind: str) -> None:
    """Raises if tools are given beside an environment that would never offer them to the model."""
    for name, given, takers in (("tools", spec.tools, _TAKE_TOOLS), ("mcp", spec.mcp, _TAKE_MCP)):
        if given and kind not in takers:
            kinds = ", ".join(f"'{taker}'" for taker in takers)
            raise EnvironmentSetupError(
                f"{spec.where}: `{name}` is for environments of the kinds {kinds}, and this is of '{kind}'; remove it"
            )


def _load_target(spec: EnvironmentSpec, base: Path) -> tuple[Any, str | None]:
    """Returns what `call` names and, if `call` itself says so, its kind: some packages have registries of names."""
    if not spec.call:
        return None, None
    package, _, name = spec.call.partition(":")
    if package in ("reasoning_gym", "verifiers"):
        return name, package
    if package == "skyrl_gym" and name in (registry := load("skyrl_gym.envs.registration:registry", spec.where)):
        make = load("skyrl_gym:make", spec.where)
        return partial(make, registry[name]), "skyrl"
    return load(spec.call, spec.where, base), None


def describe_all(environments: Sequence[Loaded]) -> None:
    """Describes environments in a process that ends thereafter: what describing them imports, and the objects it
    makes, would make every child slower to fork."""
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
    for kind, matches in _RULES.items():
        if matches(target):
            return kind
    raise EnvironmentSetupError(
        f"{spec.where}: {shown(target, 60)} is no environment that DistFlow knows: {_KNOWN}; set `environment.kind` if"
        " it is one of these all the same"
    )


def _has(target: Any, *names: str) -> bool:
    return all(callable(getattr(target, n, None)) for n in names)


def _derives(target: Any, *names: str) -> bool:
    cls = target if inspect.isclass(target) else type(target)
    return any(c.__name__ in names for c in cls.__mro__)


def _takes_states(target: Any) -> bool:
    return bool({"states", "state_dict"} & set(_parameters(target.step)))


def _is_agent(target: Any) -> bool:
    return callable(target) and not inspect.isclass(target) and "base_url" in _parameters(target)


def _is_tools(target: Any) -> bool:
    if isinstance(target, list | tuple):
        return bool(target)
    return _has(target, "create", "execute", "release") or hasattr(target, "tool_schema")


def _is_trl(target: Any) -> bool:
    if isinstance(target, dict):
        return bool(target) and all(map(callable, target.values()))
    if inspect.isclass(target) or not callable(target):
        return _has(target, "reset")
    return not _required(target)  # a factory: `describe` makes one and looks


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def _required(target: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in _parameters(target).items() if p.default is p.empty and p.kind not in kinds]


# The first rule that holds decides: TRL's is the widest, and comes last.
_RULES: dict[str, Callable[[Any], bool]] = {
    "program": _is_agent,
    "tools": _is_tools,
    "verl_loop": lambda t: _derives(t, "AgentLoopBase") or (_has(t, "run") and "sampling_params" in _parameters(t.run)),
    "skyrl": lambda t: _derives(t, "BaseTextEnv") or (_has(t, "init", "step") and not _has(t, "reset")),
    "openrlhf": lambda t: _derives(t, "AgentInstanceBase") or (_has(t, "reset", "step") and _takes_states(t)),
    "openenv": lambda t: _derives(t, "EnvClient", "HTTPEnvClient"),
    "verifiers": lambda t: any(c.__module__.startswith("verifiers.") for c in getattr(t, "__mro__", ())),
    "trl": _is_trl,
}
