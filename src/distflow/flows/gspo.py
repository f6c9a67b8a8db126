"""GSPO: GRPO with one importance ratio per response instead of one per token (arXiv 2507.18071)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def gspo(prompts, actor, reference, reward, *, clip=3e-4, clip_high=4e-4, aggregate="seq-mean-token-mean", **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score)
    learn(actor, reference, said, advantage, loss="gspo", clip=clip, clip_high=clip_high, aggregate=aggregate, **rest)
