"""The reward of a conversation: what the environment says of the whole, of its turns, and its reward functions."""

from typing import Any

import pytest

from agents.test_session import play, session, user
from distflow.agents.record import ConversationRecord, make_record
from distflow.agents.session import Session


def conversation(*turn_rewards: float | None) -> Session:
    s = session()
    b = s.begin("go")
    for k, reward in enumerate(turn_rewards):
        play(s, b, "word " * (k + 1))
        if reward is not None:
            s.reward_turn(b, reward)
        s.observe(b, [user("more")])
    return s


def record(s: Session, tool_errors: int = 0, **done: Any) -> ConversationRecord:
    weights = {"polite": 0.5, "short": 2.0}
    return make_record(s, "env", [1], {"reward": None, **done}, weights, 3, 1.0, tool_errors)


@pytest.mark.parametrize(
    ("turns", "done", "reward"),
    [
        ((None, None), {}, 0.0),
        ((0.25, -1.0, None), {}, -0.75),
        ((None, None), {"reward": 4.0}, 4.0),
        ((0.25, 0.5), {"reward": 4.0}, 4.0),  # that of the whole has the rewards of its turns in it
        ((0.25, 0.5), {"reward": 0.0}, 0.0),
        ((None,), {"rewards": {"polite": 1.0, "short": 3.0}}, 6.5),
        ((0.25, None), {"rewards": {"polite": 1.0}}, 0.75),
        ((0.25, None), {"reward": 4.0, "rewards": {"polite": 1.0, "short": -1.0}}, 2.5),
        ((None,), {"reward": float("nan")}, 0.0),
    ],
)
def test_every_reward_counts_once(turns: tuple[float | None, ...], done: dict[str, Any], reward: float) -> None:
    made = record(conversation(*turns), **done)
    assert made.reward == pytest.approx(reward)
    assert sum(made.turn_rewards) == pytest.approx(sum(r or 0.0 for r in turns))
    assert len(made.turn_rewards) == len(made.tokens) == len(made.mask)
    # The reward of a turn is at the last token that the model sampled in it.
    ends = [k for k, own in enumerate(made.mask) if own and (k + 1 == len(made.mask) or not made.mask[k + 1])]
    assert [made.turn_rewards[k] for k in ends] == [r or 0.0 for r in turns]


def test_malformed_tool_calls_are_counted_by_the_environment_or_else_by_the_worker() -> None:
    s = conversation(None)
    assert record(s, tool_errors=3).tool_errors == 3
    counted = record(s, tool_errors=3, metrics={"tool_errors": 2, "tool_calls": 5})
    assert counted.tool_errors == 2
    assert counted.metrics == {"tool_calls": 5.0}  # and not once more among its own


def test_every_branch_is_trained_and_what_they_share_is_there_once() -> None:
    s = session()
    first = s.match([user("hi")])
    hello = play(s, first, "Hello.")
    told = [user("hi"), {"role": "assistant", "content": "Hello."}]
    s.match([*told, user("one")])
    play(s, first, "First.")
    s.reward_turn(first, 0.5)
    fork = s.match([*told, user("two")])
    second = play(s, fork, "A second answer.")
    other = s.match([user("another question")])
    third = play(s, other, "Third.")
    assert s.match([user("nobody was asked this")]).turns == []
    r = record(s)
    prompt = len(first.prompt)
    begin = common(first.prompt, other.prompt)
    (fork_at, fork_of, fork_shares), (other_at, other_of, other_shares) = r.branches
    whole = first.prompt + first.tokens
    assert (fork_at, fork_of, fork_shares) == (len(first.tokens), 0, common(whole, fork.prompt + fork.tokens))
    assert fork_shares >= prompt + len(hello)
    assert (other_at, other_of, other_shares) == (len(r.tokens) - len(other.prompt) - len(third) + begin, 0, begin)
    ours = [t for t, m in zip(r.tokens, r.mask, strict=True) if m]
    assert ours == hello + first.tokens[first.turns[1].start :] + second + third
    assert [p for p, m in zip(r.logprobs, r.mask, strict=True) if m] == [-0.5] * len(ours)
    assert r.tokens[fork_at:other_at] == (fork.prompt + fork.tokens)[fork_shares:]
    assert r.tokens[other_at:] == (other.prompt + other.tokens)[other_shares:]
    assert r.turn_rewards == [0.0] * (len(first.tokens) - 1) + [0.5] + [0.0] * (len(r.tokens) - len(first.tokens))
    assert (r.turns, r.answer, r.compactions) == (4, other.tokens, 1)
    assert [h[-1]["content"] for h in r.histories] == ["First.", "A second answer.", "Third."]
    assert r.messages == r.histories[-1]


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_same_words_said_again_are_tokens_of_their_own() -> None:
    """A fork in which the model says what it said before: both times were sampled, and both are trained."""
    s = session()
    first = s.match([user("hi")])
    hello = play(s, first, "Hello.")
    again = s.begin([user("hi")])
    play(s, again, "Hello.")
    r = record(s)
    assert r.tokens == hello + hello
    assert r.branches == [(len(hello), 0, len(first.prompt))]
    assert (r.mask, r.histories[0]) == ([1] * 2 * len(hello), r.histories[1])


def test_a_subagent_is_no_compaction() -> None:
    s = session()
    main = s.begin("a task")
    play(s, main, "Ask.")
    helper = s.begin("a part of it")
    play(s, helper, "Done.")
    s.observe(main, [user("done")])
    play(s, main, "Good.")
    r = record(s)
    assert (len(r.branches), r.compactions) == (1, 0)
    assert r.messages[-1]["content"] == "Good."
    shorter = s.begin("the task, in short")
    play(s, shorter, "Well.")
    assert record(s).compactions == 1


def test_the_version_of_a_conversation_is_that_of_its_first_turn() -> None:
    s = conversation(None, None)
    s.branches[0].turns[0].weight_version = 1
    assert record(s).weight_version == 1
