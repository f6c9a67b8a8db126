"""Environments of other frameworks, unchanged, driven by a model that says what is written here."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.fake_model import Conversation, converse, start_message
from distflow.agents.env_pool import EnvPool
from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.errors import DistflowError

BASE = Path(__file__).parent
FILE = "user_environments.py"
SPECS = {
    "counter": EnvironmentSpec("counter", f"{FILE}:Counter", args={"step": 2}),
    "several": EnvironmentSpec("several", f"{FILE}:ENVIRONMENTS"),
    "factory": EnvironmentSpec("factory", f"{FILE}:make_counter"),
    "tools": EnvironmentSpec("tools", tools=[f"{FILE}:multiply", f"{FILE}:divide"]),
    "both": EnvironmentSpec("both", f"{FILE}:Counter", tools=[f"{FILE}:multiply"]),
    "skyrl": EnvironmentSpec("skyrl", f"{FILE}:Guess", args={"rules": "Guess."}),
    "search": EnvironmentSpec("search", f"{FILE}:SearchTool", args={"config": {"engine": "local"}}),
    "loop": EnvironmentSpec("loop", f"{FILE}:TwoTurns"),
    "tool_loop": EnvironmentSpec(
        "tool_loop", f"{FILE}:UsesTools", [f"{FILE}:SearchTool"], args={"config": {"engine": "local"}}
    ),
    "openrlhf": EnvironmentSpec("openrlhf", f"{FILE}:Rounds"),
    "walk": EnvironmentSpec("walk", f"{FILE}:Walk", args={"base_url": "http://localhost"}),
    "farther": EnvironmentSpec("farther", f"{FILE}:WalkFarther", args={"base_url": "http://localhost"}),
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    functions = [{"name": "count", "call": f"{FILE}:count_of", "args": {}}]
    pool = EnvPool(list(SPECS.values()), BASE, time_limit_s=60, reward_functions=functions)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def descriptions(pool: EnvPool) -> dict[str, Description]:
    return dict(zip(SPECS, pool.describe(), strict=True))


def play(pool: EnvPool, environment: str, row: dict[str, Any], say: list[str], prompt: Any = "Go.") -> Conversation:
    start = {**start_message(row, prompt), "reward_functions": []}
    (conversation,) = converse(pool, [start], say, list(SPECS).index(environment))
    return conversation


def ended(conversation: Conversation) -> dict[str, Any]:
    assert conversation.failure is None
    assert conversation.result is not None
    return conversation.result


def said(conversation: Conversation, role: str) -> list[str]:
    return [m["content"] for m in conversation.messages if m["role"] == role]


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ("counter", "trl"),
        ("several", "trl"),
        ("factory", "trl"),
        ("tools", "tools"),
        ("skyrl", "skyrl"),
        ("search", "tools"),
        ("loop", "verl_loop"),
        ("tool_loop", "verl_loop"),
        ("openrlhf", "openrlhf"),
        ("walk", "openenv"),
    ],
)
def test_the_kind_is_recognised(descriptions: dict[str, Description], environment: str, kind: str) -> None:
    assert descriptions[environment].kind == kind


def test_trl_describes_methods_as_tools(descriptions: dict[str, Description]) -> None:
    counter = descriptions["counter"]
    assert [t["function"]["name"] for t in counter.tools[""]] == ["increment", "slow_increment"]
    parameters = counter.tools[""][0]["function"]["parameters"]
    assert parameters["properties"] == {"times": {"type": "integer", "description": "How often."}}
    assert counter.columns == ("start",)
    assert descriptions["several"].choices == ("counter", "echo")
    assert [t["function"]["name"] for t in descriptions["several"].tools["echo"]] == ["echo"]
    names = [t["function"]["name"] for t in descriptions["both"].tools[""]]
    assert names == ["multiply", "increment", "slow_increment"]


def test_trl_environment(pool: EnvPool) -> None:
    say = [call("increment", times=3), call("slow_increment") + call("slow_increment"), "done"]
    conversation = play(pool, "counter", {"start": 4, "other": "x"}, say)
    assert said(conversation, "user") == ["Go. Count from 4."]
    assert said(conversation, "tool")[0] == "10"
    assert ended(conversation)["reward"] == 1.2
    assert ended(conversation)["metrics"] == {"tool_calls": 3, "tool_errors": 0}
    assert [t["function"]["name"] for t in conversation.tools] == ["increment", "slow_increment"]


def test_trl_factory(pool: EnvPool) -> None:
    assert ended(play(pool, "factory", {"start": 0}, [call("increment", times=2), ""]))["reward"] == 1.0


def test_trl_errors_are_told_to_the_model(pool: EnvPool) -> None:
    say = [call("increment", times="a"), call("decrement"), call("increment"), "<tool_call>{</tool_call>", "done"]
    conversation = play(pool, "counter", {"start": 4}, say)
    texts = said(conversation, "tool")
    assert [t.startswith("{'error': ") for t in texts] == [True] * 4
    assert "there is no tool 'decrement'; did you mean 'increment'?" in texts[1]
    assert ended(conversation)["metrics"] == {"tool_calls": 4, "tool_errors": 4}
    assert ended(conversation)["reward"] == 0.4


def test_the_row_chooses_the_environment(pool: EnvPool) -> None:
    conversation = play(pool, "several", {"environment": "echo"}, [call("echo", text="héllo"), "done"])
    assert said(conversation, "tool") == ["héllo"]
    assert ended(conversation)["reward"] is None
    assert ended(play(pool, "several", {"environment": "counter", "start": 1}, ["done"]))["reward"] == 0.1
    unknown = play(pool, "several", {"environment": "ecko"}, ["done"])
    assert unknown.failure is not None
    assert "has no environment 'ecko'; did you mean 'echo'?" in unknown.failure


def test_tools_alone(pool: EnvPool) -> None:
    say = [call("multiply", a=6, b=7) + call("divide", a=1, b=0), "42"]
    conversation = play(pool, "tools", {}, say, [{"role": "user", "content": "6 × 7?"}])
    assert said(conversation, "tool") == ["42", "{'error': 'division by zero'}"]
    assert ended(conversation)["reward"] is None


def test_limits_of_the_worker_end_the_conversation(pool: EnvPool) -> None:
    conversation = play(pool, "counter", {"start": 0}, [call("increment", times=1)] * 3)
    assert ended(conversation)["reward"] == 0.6


def test_content_blocks_get_the_observation(pool: EnvPool) -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    conversation = play(pool, "counter", {"start": 0}, ["done"], prompt)
    assert conversation.messages[0]["content"] == [
        {"type": "text", "text": "Go."},
        {"type": "text", "text": " Count from 0."},
    ]


def test_skyrl(pool: EnvPool) -> None:
    conversation = play(pool, "skyrl", {"answer": "b"}, ["a", "c", "b"])
    assert conversation.roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert conversation.turn_rewards == [-0.25, -0.25, 1.0]
    assert ended(conversation)["reward"] == 0.5
    assert ended(conversation)["metrics"] == {"length": 3.0, "tries": 2.0}


def test_verl_base_tool(pool: EnvPool) -> None:
    row = {"extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"answer": "cat"}}}}}
    conversation = play(pool, "search", row, [call("search", query="dog"), call("search", query="cat"), "done"])
    assert said(conversation, "tool") == ["local: dog", "local: cat"]
    assert conversation.turn_rewards == [0.25, 0.25]
    assert ended(conversation)["reward"] == 1.5


def test_an_agent_loop_of_verl_has_the_tools_beside_it(pool: EnvPool) -> None:
    conversation = play(pool, "tool_loop", {}, ["cat", "done"])
    assert ended(conversation)["reward"] == 0.25
    assert conversation.generated[1] == [ord(c) for c in "[user]Go.|cat[tool]local: cat|"]


def test_verl_agent_loop(pool: EnvPool) -> None:
    conversation = play(pool, "loop", {"answer": "yes"}, ["no", "yes"])
    first, second = ("".join(map(chr, tokens)) for tokens in conversation.generated)
    assert (first, second) == ("[user]Go.|", "[user]Go.|no<NO>")
    assert ended(conversation)["reward"] == 1.0
    assert ended(conversation)["metrics"] == {"num_turns": 4.0}


def test_openrlhf(pool: EnvPool) -> None:
    conversation = play(pool, "openrlhf", {"label": "b"}, ["a", "b"], [{"role": "user", "content": "Go."}])
    first, second = ("".join(map(chr, tokens)) for tokens in conversation.generated)
    assert (first, second) == ("[user]Go.|?", "[user]Go.|?a\nAgain:")
    assert conversation.turn_rewards == [0.0, 1.0]
    assert ended(conversation)["reward"] == 1.0
    assert ended(conversation)["metrics"] == {"rounds": 2.0, "scores": 2.0}


def test_openenv_action_of_one_field_is_text(pool: EnvPool, descriptions: dict[str, Description]) -> None:
    assert descriptions["walk"].tools == {"": []}
    conversation = play(pool, "walk", {"reset_kwargs": {"x": 1}}, ["one", " 1 ", "1"])
    assert said(conversation, "user")[0] == 'Go.{"x": 1}'
    assert "{'error':" in said(conversation, "user")[1]
    assert conversation.turn_rewards == [0.0, 1.0]
    assert ended(conversation)["reward"] == 1.0
    assert ended(conversation)["metrics"] == {"tool_calls": 3, "tool_errors": 1, "distance": 0.0}


def test_openenv_action_of_several_fields_is_a_tool(pool: EnvPool, descriptions: dict[str, Description]) -> None:
    (tool,) = descriptions["farther"].tools[""]
    assert tool["function"]["name"] == "step"
    assert tool["function"]["parameters"]["required"] == ["steps", "direction"]
    say = [call("step", steps=1, direction="left"), call("step", steps=4, direction="right")]
    assert ended(play(pool, "farther", {}, say))["reward"] == 1.0


def test_reward_functions_that_take_environments(pool: EnvPool) -> None:
    start = {**start_message({"start": 3}), "reward_functions": ["count"]}
    (conversation,) = converse(pool, [start], [call("increment", times=1), "done"])
    assert ended(conversation)["rewards"] == {"count": 6.5}
    assert ended(conversation)["reward"] == 0.5


@contextmanager
def made(*specs: EnvironmentSpec, **options: Any) -> Iterator[EnvPool]:
    pool = EnvPool(specs, BASE, **options)
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EnvironmentSpec("e", tools=[f"{FILE}:no_hints"]), "tool 'no_hints': parameter 'a' has no type hint; write a"),
        (EnvironmentSpec("e", tools=[f"{FILE}:no_docstring"]), "tool 'no_docstring': .*docstring"),
        (
            EnvironmentSpec("e", tools=[f"{FILE}:any_number"]),
            r"tool 'any_number' takes \*numbers: int, which",
        ),
        (EnvironmentSpec("e", tools=[f"{FILE}:multiply"] * 2), "two tools are named 'multiply'"),
        (EnvironmentSpec("e", f"{FILE}:NUMBER"), "environment 'e' .*: 7 is no environment that DistFlow knows: a TRL"),
        (EnvironmentSpec("e", f"{FILE}:Nothing"), "is no environment that DistFlow knows"),
        (EnvironmentSpec("e", f"{FILE}:Countre"), "has no 'Countre'; did you mean 'Counter'?"),
        (EnvironmentSpec("e", "nowhere.py:Env"), "does not import: there is no file"),
        (EnvironmentSpec("e", "verl.tools.mine:Tool"), "No module named 'verl'.* that it is installed"),
        (EnvironmentSpec("e", "verifiers:nothing"), "verifiers is not installed in .*; pip install|cannot make it"),
        (EnvironmentSpec("e", f"{FILE}:Walk"), "which server\\? Set `environment.args.base_url`"),
        (EnvironmentSpec("e", f"{FILE}:SearchTool", args={"config": 1}), "set `args.config` and `args.tool_schema`"),
        (EnvironmentSpec("e", f"{FILE}:Counter", kind="trll"), "kind 'trll' is not known; did you mean 'trl'?"),
        (
            EnvironmentSpec("e", f"{FILE}:Guess", tools=[f"{FILE}:multiply"]),
            "`tools` is for environments of the kinds 'tools', 'trl', 'verl_loop', and this is of 'skyrl'; remove it",
        ),
        (
            EnvironmentSpec("e", f"{FILE}:UsesTools", tools=[f"{FILE}:multiply"]),
            "tool 'multiply' is a plain function, and verl's agent loops call verl's own",
        ),
        (EnvironmentSpec("e", f"{FILE}:Counter", python="/nowhere/python"), "cannot start /nowhere/python"),
    ],
)
def test_bad_input_is_refused_before_training(spec: EnvironmentSpec, message: str) -> None:
    def load() -> None:
        with made(spec) as pool:
            pool.describe()

    with pytest.raises(EnvironmentSetupError, match=message.replace("?", "\\?").replace("\\\\?", "\\?")):
        load()
    assert issubclass(EnvironmentSetupError, DistflowError)


def test_reasoning_gym() -> None:
    """A data set by its name: of its own tasks, and of rows written to a file."""
    pytest.importorskip("reasoning_gym")
    from distflow.reward.reasoning_gym import rows

    (row,) = rows("chain_sum", 1, seed=3)
    with made(EnvironmentSpec("sums", "reasoning_gym:chain_sum", args={"max_terms": 2})) as pool:
        own, written = converse(
            pool, [start_message(), start_message(row, row["prompt"])], lambda m: f"<answer>{_sum(m)}</answer>"
        )
    assert ended(own)["reward"] == ended(written)["reward"] == 1.0


def _sum(messages: list[dict[str, Any]]) -> int:
    terms = re.findall(r"[-+]?\s*\d+", messages[-1]["content"].rpartition(":")[2])
    return sum(int(t.replace(" ", "")) for t in terms)


def test_skyrl_gym() -> None:
    """A registered name, with a row as TRL has it."""
    pytest.importorskip("skyrl_gym")
    with made(EnvironmentSpec("gsm8k", "skyrl_gym:gsm8k")) as pool:
        assert pool.describe()[0].kind == "skyrl"
        starts = [start_message({"answer": answer}) for answer in ("42", "43")]
        right, wrong = converse(pool, starts, ["So it is #### 42"])
    assert (ended(right)["reward"], ended(wrong)["reward"]) == (1.0, 0.0)
