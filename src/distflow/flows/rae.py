"""RAE: the baseline is a moving average of the scores of a role; needs no group (arXiv 2506.24119)."""

from distflow.algo.options import Decay
from distflow.flow import flow
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def rae(prompts, actor, reference, reward, ema_baseline, *, decay: Decay = 0.95, clip=0.2, dual_clip=3.0, **rest):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    roles = [prompts["data_source"]] if "data_source" in prompts.fields else []  # without it there is one role
    advantage = ema_baseline.advantage(score, *roles, decay=decay)
    update_policy(actor, reference, rollout, advantage, loss="policy", clip=clip, dual_clip=dual_clip, **rest)
