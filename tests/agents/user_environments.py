"""Environments, tools and agents as users of other frameworks write them; none of these is installed."""

import asyncio
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

# --- TRL


class Counter:
    """An environment of TRL."""

    def __init__(self, step: int = 1) -> None:
        self._step, self._count = step, 0

    def reset(self, start: int, **row: Any) -> str:
        self._count = start
        self.row = row
        return f" Count from {start}."

    def increment(self, times: int) -> int:
        """Increments the counter.

        Args:
            times: How often.
        """
        self._count += times * self._step
        return self._count

    async def slow_increment(self) -> str:
        """Increments the counter by one, later."""
        await asyncio.sleep(0.01)
        self._count += 1
        return f"now {self._count}"

    async def get_reward(self) -> float:
        return self._count / 10


class Echo:
    def reset(self, **row: Any) -> None:
        assert "environment" not in row

    def echo(self, text: str) -> str:
        """Says it again.

        Args:
            text: What to say.
        """
        return text


ENVIRONMENTS = {"counter": Counter, "echo": Echo}


def make_counter(step: int = 5) -> Counter:
    return Counter(step)


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


async def divide(a: int, b: int) -> float:
    """Divides two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a / b


def no_hints(a, b):
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def no_docstring(a: int) -> int:
    return a


def any_number(*numbers: int) -> int:
    """Adds."""
    return sum(numbers)


def count_of(prompts: list[Any], completions: list[Any], environments: list[Counter], **columns: Any) -> list[float]:
    """A reward function of TRL that looks into the environments."""
    assert len(environments) == len(completions) == len(prompts) == len(columns["start"]) == 1
    return [environments[0]._count + 0.5 * len(completions[0])]


NUMBER = 7


class Nothing:
    pass


# --- skyrl-gym


class Guess:
    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.config, self.extras = env_config, extras or {}
        self.closed = False

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": self.config.rules}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        done = action == self.extras["reward_spec"]["ground_truth"]
        hint = [] if done else [{"role": "user", "content": "No."}]
        return {
            "observations": hint,
            "reward": 1.0 if done else -0.25,
            "done": done,
            "metadata": {"tries": 2, "why": "x"},
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"length": 3, "note": "text"}

    def close(self) -> None:
        self.closed = True


# --- verl


class SearchTool:
    """A `BaseTool`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or {
            "type": "function",
            "function": {"name": "search", "description": "Searches.", "parameters": {"type": "object"}},
        }
        self.instances: dict[str, list[str]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        assert kwargs["create_kwargs"]["answer"] == kwargs["answer"]  # verl passes the one or the other
        self.instances["1"] = [kwargs["answer"]]
        return "1", SimpleNamespace(text="")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        self.instances[instance_id].append(parameters["query"])
        return SimpleNamespace(text=f"{self.config['engine']}: {parameters['query']}"), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        answer, *queries = self.instances[instance_id]
        return float(answer in queries)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]


class AgentLoopBase:
    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        self.config, self.server_manager, self.tokenizer = trainer_config.config, server_manager, tokenizer
        self.loop = asyncio.get_running_loop()


class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        prompt = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)
        tokens = list(prompt)
        mask: list[int] = []
        for _ in range(2):
            output = await self.server_manager.generate(
                request_id="1", prompt_ids=tokens, sampling_params=sampling_params
            )
            said = self.tokenizer.decode(output.token_ids)
            tool = self.tokenizer.encode(f"<{said.upper()}>", add_special_tokens=False)
            tokens += output.token_ids + tool
            mask += [1] * len(output.token_ids) + [0] * len(tool)
        length = self.config.actor_rollout_ref.rollout.response_length
        return SimpleNamespace(
            prompt_ids=prompt,
            response_ids=tokens[len(prompt) :][:length],
            response_mask=mask[:length],
            reward_score=float(said == row["answer"]),
            num_turns=4,
            metrics={},
            extra_fields={"said": said},
        )


class UsesTools(AgentLoopBase):
    """Renders what follows a turn by difference, and calls the tools it was given, as verl's own loop does."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools = {t.tool_schema["function"]["name"]: t for t in tools.tools}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        messages = list(row["raw_prompt"])
        tokens = list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        output = await self.server_manager.generate("1", prompt_ids=tokens, sampling_params=sampling_params)
        query = self.tokenizer.decode(output.token_ids)
        tool = self.tools["search"]
        instance, _ = await tool.create(None, answer="cat", create_kwargs={"answer": "cat"})
        response, reward, _ = await tool.execute(instance, {"query": query})
        before = self.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        messages.append({"role": "tool", "content": response.text})
        after = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens += output.token_ids + after[len(before) :]
        output = await self.server_manager.generate("1", prompt_ids=tokens, sampling_params=sampling_params)
        return SimpleNamespace(reward_score=reward, num_turns=4, metrics={}, extra_fields={})


# --- OpenRLHF


class AgentInstanceBase:
    pass


class Rounds(AgentInstanceBase):
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.rounds = 0
        return {"observation": states["observation"] + "?"}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.rounds += 1
        right = states["action_text"] == states["label"]
        return {
            "rewards": float(right),
            "scores": float(right) * 2,
            "environment_feedback": "" if right else "\nAgain:",
            "done": right,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"rounds": self.rounds},
        }


# --- OpenEnv

Act = TypeVar("Act")
Obs = TypeVar("Obs")


class Move(BaseModel):
    metadata: dict[str, Any] = {}
    steps: int


class MoveFarther(Move):
    """Moves in a direction."""

    direction: str


class Position(BaseModel):
    x: int
    metadata: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False


class EnvClient(Generic[Act, Obs]):
    def __init__(self, base_url: str) -> None:
        self.base_url, self.x = base_url, 0

    def __enter__(self) -> "EnvClient[Act, Obs]":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reset(self, seed: int, x: int = 0) -> Any:
        self.x = x
        return SimpleNamespace(observation=Position(x=self.x), reward=None, done=False)

    def step(self, action: Any) -> Any:
        self.x += action.steps * (-1 if getattr(action, "direction", "right") == "left" else 1)
        done = self.x == 3
        return SimpleNamespace(
            observation=Position(x=self.x, metadata={"distance": abs(3 - self.x)}), reward=float(done), done=done
        )


class Walk(EnvClient[Move, Position]):
    pass


class WalkFarther(EnvClient[MoveFarther, Position]):
    pass
