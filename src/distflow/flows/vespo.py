"""VESPO: the policy gradient weighed by a smooth function of the ratio of a response (arXiv 2602.10693)."""

from typing import Any

from distflow.algo.options import NonNegative
from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def vespo(
    prompts,
    actor,
    reference,
    reward,
    *,
    power: NonNegative = 2.0,
    decay: NonNegative = 3.0,
    power_negative: NonNegative = 3.0,
    decay_negative: NonNegative = 2.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = group_advantage(score)
    own: dict[str, Any] = {
        "power": power,
        "decay": decay,
        "power_negative": power_negative,
        "decay_negative": decay_negative,
    }
    update_policy(actor, reference, rollout, advantage, loss="vespo", **own, **rest)
