"""REINFORCE++ with a baseline: against the group's mean, in standard deviations of the batch (arXiv 2501.03262)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import batch_advantage


@flow(also=learn)
def reinforce_pp_baseline(prompts, actor, reference, reward, *, clip=0.2, kl_kind="k2", **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = batch_advantage(score, scale="batch")
    learn(actor, reference, said, advantage, loss="policy", clip=clip, kl_kind=kl_kind, **rest)
