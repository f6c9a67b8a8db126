"""OpenRLHF's `AgentInstanceBase`: text that the environment has formatted itself is appended to what was sampled."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import derives_from, has_methods, parameters_of
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, check_reward, numbers_of
from distflow.agents.rows import reward_spec
from distflow.agents.spec import Description


def describe(environment: LoadedEnvironment) -> Description:
    return Description("openrlhf")


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Lets the model continue the text until `step` says that it is done."""
    row, prompt = start["row"], start["prompt"]
    if not isinstance(prompt, str):
        prompt = session.decode(session.apply_chat_template(prompt), keep_special=True)
    label = row["label"] if "label" in row else reward_spec(row).get("ground_truth")
    agent = environment.target(**environment.spec.args)
    states = session.run(agent.reset({"observation": prompt, "label": label}))
    text = _get(states, "observation", "reset")
    tokens = session.encode(text, special=True)
    sampling = SimpleNamespace(**start.get("sampling") or {})
    result = Outcome(0.0)
    while (reply := session.generate(tokens)) is not None:
        action = session.decode(reply["token_ids"])
        states = {"observation_text": text, "action_text": action, "label": label, "sampling_params": sampling}
        step = session.run(agent.step(states))
        reward = _get(step, "rewards", "step")
        result.reward = (result.reward or 0.0) + session.turn_reward(_number(reward))
        result.metrics = numbers_of({k: _number(v) for k, v in (step.get("extra_logs") or {}).items()})
        if "scores" in step:
            result.metrics["scores"] = check_reward(_number(step["scores"]))
        if step.get("done"):
            break
        feedback = str(_get(step, "environment_feedback", "step"))
        text += action + feedback
        tokens = [*tokens, *reply["token_ids"], *session.encode(feedback, special=True)]
    result.environment = agent
    return result


def _get(values: Any, name: str, method: str) -> Any:
    if not isinstance(values, Mapping) or name not in values:
        raise EnvironmentFault(f"returned no dict with '{name}' from `{method}`")
    return values[name]


def _number(value: Any) -> Any:
    """Reads a tensor of one element, of any shape."""
    return value.item() if hasattr(value, "item") else value


def _takes_states(target: Any) -> bool:
    return bool({"states", "state_dict"} & set(parameters_of(target.step)))


ADAPTER = EnvironmentAdapter(
    describe,
    drive,
    lambda t: derives_from(t, "AgentInstanceBase") or (has_methods(t, "reset", "step") and _takes_states(t)),
    "an OpenRLHF AgentInstanceBase",
)
