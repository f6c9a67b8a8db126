"""verl's `AgentLoopBase`: a coroutine that works on token ids and calls `server_manager.generate`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from distflow.agents.adapter import EnvironmentAdapter, LoadedEnvironment
from distflow.agents.adapters.looks import accepted, derives_from, has_methods, parameters_of
from distflow.agents.child import ChildSession, EnvironmentFault, Outcome, check_reward, numbers_of
from distflow.agents.rows import as_messages
from distflow.agents.settings import Settings, merge
from distflow.agents.spec import Description, EnvironmentSetupError

# What agent loops read of verl's config; `environment.args` is laid over it.
_CONFIG = {
    "actor_rollout_ref": {
        "rollout": {
            "prompt_length": 1 << 20,
            "response_length": 1 << 20,
            "multi_turn": {
                "format": "hermes",
                "max_parallel_calls": 1,
                "max_tool_response_length": 1 << 16,
                "tool_response_truncate_side": "middle",
            },
        },
        "model": {},
    },
    "data": {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}},
}


def describe(environment: LoadedEnvironment) -> Description:
    for tool in environment.tools:
        if tool.source is None:
            raise EnvironmentSetupError(
                f"{environment.spec.where}: tool '{tool.name}' is a plain function, and verl's agent loops call verl's"
                " own tools; decorate it with verl's `@function_tool`, or name a BaseTool"
            )
    return Description("verl_loop")


def drive(environment: LoadedEnvironment, start: Mapping[str, Any], session: ChildSession) -> Outcome:
    """Runs the loop. Trained are the tokens of its calls of `generate`, as they were sampled."""
    config = Settings(merge(_CONFIG, environment.spec.args))
    given = {
        "trainer_config": SimpleNamespace(config=config),
        "server_manager": ServerManager(session),
        "tokenizer": Tokenizer(session),
        "processor": None,
        "dataset_cls": None,
        "data_config": SimpleNamespace(config=config.data),
        "dataset_config": config.data,
        "tools": SimpleNamespace(tools=[t.source for t in environment.tools]),
    }

    async def run() -> Any:  # its constructor may ask for the running loop
        loop = environment.target(**accepted(environment.target, given))
        row = {**start["row"], "raw_prompt": as_messages(start["prompt"])}
        return await loop.run(dict(start.get("sampling") or {}), **row)

    output = session.run(run())
    score = _field(output, "reward_score")
    extra = _field(output, "extra_fields") or {}
    metrics = {"num_turns": _field(output, "num_turns"), **numbers_of(extra)}
    return Outcome(None if score is None else check_reward(score), metrics=numbers_of(metrics))


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


@dataclass
class TokenOutput:
    """The result of `generate`, in the form that verl's rollout servers return."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    routed_experts: Any = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """Stands for verl's rollout servers."""

    def __init__(self, session: ChildSession) -> None:
        self._session, self._refused = session, False

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Continues the tokens; returns no tokens, once, when the sample has used up its turns or tokens."""
        if image_data:
            raise EnvironmentFault("generates from tokens and images; its images are taken from messages only")
        reply = await asyncio.to_thread(self._session.generate, list(prompt_ids), _plain(sampling_params))
        if reply is None:
            if self._refused:
                raise EnvironmentFault(f"went on generating after its sample ended ({self._session.ended})")
            self._refused = True
            return TokenOutput([], [], "length")
        reason = "completed" if reply["finish_reason"] == "stop" else reply["finish_reason"]
        return TokenOutput(reply["token_ids"], reply["logprobs"], reason)


class Tokenizer:
    """The tokenizer of the worker, as far as agent loops need one."""

    def __init__(self, session: ChildSession) -> None:
        self._session = session

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._session.encode(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        tokens = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._session.decode(tokens, keep_special=not skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **_: Any,
    ) -> Any:
        tokens = self._session.apply_chat_template(messages, tools or (), add_generation_prompt)
        if not tokenize:
            return self._session.decode(tokens, keep_special=True)
        return {"input_ids": tokens} if return_dict else tokens

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the tokenizer of an agent loop has no '{name}': it knows apply_chat_template, encode and decode"
        )


def _plain(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sampling.items() if isinstance(v, bool | int | float | str | list | None)}


ADAPTER = EnvironmentAdapter(
    describe,
    drive,
    lambda t: derives_from(t, "AgentLoopBase") or (has_methods(t, "run") and "sampling_params" in parameters_of(t.run)),
    "a verl AgentLoopBase",
    takes=("tools",),
)
