"""The process of a conversation, which drives the user's environment; `userproc` forks it."""

import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distflow.agents.child import ChildSession, EnvironmentFault, Outcome
from distflow.agents.detect import describe_all, load_environment
from distflow.agents.reward_functions import load_functions
from distflow.agents.spec import EnvironmentSpec
from distflow.errors import PACKAGE, describe_error


def prepare(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Imports the environments and the reward functions, in the fork server; the answer describes the environments."""
    base = Path(arguments["base"])
    specs = [(i, EnvironmentSpec(**fields)) for i, fields in arguments["environments"]]
    environments = {i: load_environment(spec, base) for i, spec in specs}
    describe_all(list(environments.values()))
    functions = load_functions(arguments["reward_functions"], base)
    return (environments, functions), [[i, asdict(e.description)] for i, e in environments.items()]


def serve(shared: Any, channel: socket.socket) -> None:
    """Runs one conversation and tells the worker how it ended."""
    environments, functions = shared
    session = ChildSession(channel)
    start = session.first_message()
    environment = environments[start["index"]]
    _seed(start["seed"])
    outcome, error = Outcome(), None
    try:
        outcome = environment.adapter.drive(environment, start, session)
        wanted = start.get("reward_functions")  # of this environment; None: all
        for function in [f for f in functions if wanted is None or f.name in wanted]:
            outcome.rewards[function.name] = function.score(start, session, outcome.environment)
    except EnvironmentFault as e:
        error = str(e)
    except BaseException as e:  # sys.exit() in an environment, too
        error = f"raised {describe_error(e, _is_own)}"
    try:
        session.done(outcome, error)
    except EnvironmentFault as e:
        session.done(Outcome(), str(e))


def _seed(seed: int) -> None:
    """Seeds the global generators by the sample: forks of one process would all draw the same numbers."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed % 2**63)


def _is_own(filename: str) -> bool:
    """Returns whether a file is the user's own: neither ours nor of a library."""
    return not filename.startswith((PACKAGE, sys.prefix, sys.base_prefix, "<"))
