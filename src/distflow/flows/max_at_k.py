"""Trains for the best of k responses: a sample counts by what it adds to the best of a choice (arXiv 2505.15201)."""

from distflow.algo.options import BestOfBaseline, PositiveCount
from distflow.flow import flow
from distflow.flows.nodes import best_of_k_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def max_at_k(
    prompts,
    actor,
    reference,
    reward,
    *,
    k: PositiveCount = 4,  # at most rollout.n
    baseline: BestOfBaseline = "without",  # mean: pass@k training, of arXiv 2508.10751
    clip=0.2,
    dual_clip=3.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    advantage = best_of_k_advantage(score, k=k, baseline=baseline)
    update_policy(actor, reference, rollout, advantage, loss="policy", clip=clip, dual_clip=dual_clip, **rest)
