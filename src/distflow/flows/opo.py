"""OPO: exactly on-policy, with the baseline of least variance: scores weighted by length (arXiv 2505.23585)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage


@flow(also=learn)
def opo(prompts, actor, reference, reward, *, aggregate="seq-mean-token-sum-norm", **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = group_advantage(score, said["response_tokens"], baseline="length", scale="none")
    learn(actor, reference, said, advantage, loss="reinforce", aggregate=aggregate, **rest)
