"""Dr. GRPO: GRPO without its two biases, towards easy prompts and towards long wrong responses (arXiv 2503.20783)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def dr_grpo(prompts, actor, reference, reward, *, clip=0.2, aggregate="seq-mean-token-sum-norm", **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score, scale="none")  # not divided by the standard deviation
    learn(actor, reference, said, advantage, loss="policy", clip=clip, aggregate=aggregate, **rest)
