"""skyrl-gym's `BaseTextEnv`: text in, messages and a reward out, turn by turn."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import accepted, derives_from, has_methods
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, numbers_of
from distflow.agents.rows import as_messages, reward_spec
from distflow.agents.settings import Settings
from distflow.agents.spec import Description
from distflow.flow.importing import load


def describe(environment: LoadedEnvironment) -> Description:
    return Description("skyrl")


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Steps the environment with every turn until it is done. Tokens stay as they were sampled, whatever
    `postprocessed_action` says."""
    extras = {k: v for k, v in start["row"].items() if k != "prompt"}
    extras.setdefault("reward_spec", reward_spec(extras))
    extras.setdefault("max_turns", start.get("max_turns", 1))
    given = {"env_config": Settings(environment.spec.args), "extras": extras}
    env = environment.target(**accepted(environment.target, given))
    messages, _ = env.init(as_messages(start["prompt"]))
    session.begin(messages)
    reward, metadata = 0.0, dict[str, Any]()
    observations: list[dict[str, Any]] = []
    while (turn := session.turn(observations)) is not None:
        step = session.run(env.step(turn.text))
        if not isinstance(step, Mapping) or "done" not in step:
            raise EnvironmentFault("returned no dict with 'observations', 'reward' and 'done' from `step`")
        reward += session.turn_reward(step.get("reward") or 0.0)
        metadata = step.get("metadata") or metadata
        if step["done"]:
            break
        observations = step.get("observations") or []
    metrics = numbers_of(metadata) | numbers_of(env.get_metrics() if hasattr(env, "get_metrics") else {})
    result = Outcome(reward, metrics=metrics)
    if hasattr(env, "close"):  # a class of the user's own may have nothing to give back
        env.close()
    result.environment = env
    return result


def _by_name(name: str, where: str) -> Any:
    """Returns the factory of a registered environment, None if the name is not registered."""
    registry = load("skyrl_gym.envs.registration:registry", where)
    return partial(load("skyrl_gym:make", where), registry[name]) if name in registry else None


ADAPTER = EnvironmentAdapter(
    describe,
    drive,
    lambda t: derives_from(t, "BaseTextEnv") or (has_methods(t, "init", "step") and not has_methods(t, "reset")),
    "a skyrl-gym BaseTextEnv (`init`, `step`)",
    package="skyrl_gym",
    by_name=_by_name,
)
