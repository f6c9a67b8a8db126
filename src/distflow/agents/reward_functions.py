"""TRL's reward functions that take `environments`: they run in the process of a conversation."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distflow.agents.spec import EnvironmentSetupError
from distflow.flow.importing import load

if TYPE_CHECKING:
    from distflow.agents.child import ChildSession

_GIVEN = {"prompts", "completions", "environments", "trainer_state", "log_extra", "log_metric"}


@dataclass(frozen=True)
class EndFunction:
    """A function that scores a conversation at its end, called with lists of one."""

    name: str
    function: Callable[..., Any]
    args: Mapping[str, Any]

    def score(self, start: Mapping[str, Any], session: "ChildSession", environment: Any) -> float:
        from distflow.agents.child import EnvironmentFault, check_reward

        arguments = {
            **{name: [value] for name, value in start["row"].items()},
            "prompts": [session.messages[: session.prompt_messages]],
            "completions": [session.messages[session.prompt_messages :]],
            "environments": [environment],
            "trainer_state": SimpleNamespace(**start.get("trainer_state", {})),
            "log_extra": lambda *_: None,
            "log_metric": lambda *_: None,
            **self.args,
        }
        parameters = inspect.signature(self.function).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        scores = session.run(self.function(**arguments))
        if not isinstance(scores, Sequence) or len(scores) != 1:
            raise EnvironmentFault(f"got {scores!r} from reward '{self.name}'; it has to return a list of one number")
        return 0.0 if scores[0] is None else check_reward(scores[0])


def load_functions(functions: Sequence[Mapping[str, Any]], base: Path) -> list[EndFunction]:
    """Imports the functions; raises if one asks for tokens, which are not in the process of a conversation."""
    loaded = []
    for f in functions:
        function = load(f["call"], f"reward '{f['name']}'", base)
        if "completion_ids" in inspect.signature(function).parameters:
            raise EnvironmentSetupError(
                f"reward '{f['name']}' ({f['call']}): takes both `environments` and `completion_ids`; a function with"
                " `environments` runs beside its environment, where only messages are: use `completions`"
            )
        loaded.append(EndFunction(f["name"], function, f.get("args", {})))
    return loaded
