"""CPGD: log-ratios in place of ratios, and a price for leaving the old policy (arXiv 2505.12504)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def cpgd(prompts, actor, reference, reward, *, clip=0.2, drift=0.001, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score)
    learn(actor, reference, said, advantage, loss="cpgd", clip=clip, drift=drift, **rest)
