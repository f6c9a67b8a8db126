"""Datasets of reasoning-gym as environments of one turn: `call: reasoning_gym:leg_counting`.

A row that `distflow.reward.reasoning_gym` wrote is asked and scored as it is; any other row, of which only the
seed counts, gets a task of its own.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.child import ChildSession, Outcome, check_reward
from distflow.agents.rows import as_messages
from distflow.agents.spec import Description


def describe(environment: LoadedEnvironment) -> Description:
    """Generates a task, so that a wrong option is an error before training."""
    _task(environment, 0)
    return Description("reasoning_gym")


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    row = start["row"]
    if isinstance(info := row.get("extra_info"), Mapping) and "metadata" in info:
        session.begin(as_messages(start["prompt"]))
        turn = session.turn()
        value = _package().score(environment.target, turn.text, row.get("answer"), info) if turn else 0.0
        return Outcome(check_reward(value))
    dataset = _task(environment, start["seed"] % 2**31)
    entry = dataset[0]
    *before, last = as_messages(start["prompt"])
    session.begin([*before, {**last, "content": f"{last['content']}{entry['question']}"}])
    turn = session.turn()
    answer = _package().last_answer(turn.text) if turn else ""
    return Outcome(check_reward(dataset.score_answer(answer, entry)))


def _task(environment: LoadedEnvironment, seed: int) -> Any:
    return _package().create_dataset(environment.target, {**environment.spec.args, "size": 1, "seed": seed})


def _package() -> Any:
    """Imports the package, which is optional; its error names the way out."""
    return importlib.import_module("distflow.reward.reasoning_gym")


ADAPTER = EnvironmentAdapter(
    describe, drive, lambda target: False, "a data set `reasoning_gym:name`", package="reasoning_gym", prepare=_package
)
