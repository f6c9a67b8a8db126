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


def test_the_branch_with_most_sampled_tokens_is_trained_however_long_the_others_are() -> None:
    s = session()
    talkative = s.begin("a")
    play(s, talkative, "one two three four five six seven")
    longer = s.begin("a prompt that is much longer")
    play(s, longer, "one")
    s.observe(longer, [user("words of the environment " * 30)])
    play(s, longer, "two")
    assert len(longer.tokens) > len(talkative.tokens)
    assert s.trained_branch() is talkative
    assert record(s).tokens == talkative.tokens
    equal = s.begin("b")
    play(s, equal, "one two three four five six seven")
    assert s.trained_branch() is equal  # of equal ones, the latest


def test_the_version_of_a_conversation_is_that_of_its_latest_turn() -> None:
    s = conversation(None, None)
    s.branches[0].turns[0].weight_version = 1
    assert record(s).weight_version == 3
