"""GRPO: several responses to a prompt, each judged against the others (arXiv 2402.03300)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def grpo(prompts, actor, reference, reward, *, scale="std", clip=0.2, clip_high=None, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score, scale=scale)  # (score − mean of its group) / standard deviation
    learn(actor, reference, said, advantage, loss="policy", clip=clip, clip_high=clip_high, **rest)
