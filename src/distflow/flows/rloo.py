"""RLOO: a response against the mean of the *other* responses to its prompt, an unbiased baseline (arXiv 2402.14740)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def rloo(prompts, actor, reference, reward, *, clip=0.2, aggregate="seq-mean-token-sum", **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score, baseline="others", scale="none")
    learn(actor, reference, said, advantage, loss="policy", clip=clip, aggregate=aggregate, **rest)
