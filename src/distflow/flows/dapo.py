"""DAPO: GRPO with clip-higher, dynamic sampling and an overlong penalty (arXiv 2503.14476)."""

from distflow.algo.options import Count, PositiveCount
from distflow.flow import flow
from distflow.flows.nodes import group_advantage, nonzero_std, overlong_penalty
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def dapo(
    prompts,
    actor,
    reference,
    reward,
    *,
    clip=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    max_gen_batches: PositiveCount = 10,  # generated at most to fill one batch
    overlong_limit: Count = 0,  # tokens of a response that gets the full penalty; 0: no penalty
    overlong_buffer: Count = 0,  # tokens before the limit over which the penalty rises from 0
    overlong_penalty_factor=1.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    nonzero_std(score, dynamic_sampling=max_gen_batches)  # below: a full batch of groups with different scores
    if overlong_limit:
        limits = {"limit": overlong_limit, "buffer": overlong_buffer, "factor": overlong_penalty_factor}
        score = overlong_penalty(score, rollout["response_tokens"], **limits)
    advantage = group_advantage(score, field="shaped_score" if overlong_limit else "score")
    clips = {"clip": clip, "clip_high": clip_high, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, loss="policy", **clips, **rest)
