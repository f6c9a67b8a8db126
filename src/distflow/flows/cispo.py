"""CISPO: the clipped ratio only weighs a token, so that none loses its gradient (arXiv 2506.13585)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def cispo(prompts, actor, reference, reward, *, clip=1.0, clip_high=0.2, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score)
    learn(actor, reference, said, advantage, loss="cispo", clip=clip, clip_high=clip_high, **rest)
