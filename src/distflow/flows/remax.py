"""ReMax: a response against the greedy one to the same prompt; neither critic nor group (arXiv 2310.10505)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import better_than_greedy


@flow(also=learn)
def remax(prompts, actor, reference, reward, *, aggregate="seq-mean-token-sum-norm", **rest):
    said = actor.generate(prompts["prompt"])
    greedy = actor.generate(prompts["prompt"], temperature=0.0, prefix="greedy_")
    score = reward.score(prompts, said)
    baseline = reward.score(prompts, greedy, prefix="greedy_")
    advantage = better_than_greedy(score, baseline)
    learn(actor, reference, said, advantage, loss="reinforce", aggregate=aggregate, **rest)
