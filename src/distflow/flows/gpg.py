"""GPG: the bare policy gradient on group-relative scores, without ratio, clip and reference (arXiv 2504.02546)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import batch_advantage


@flow(also=learn)
def gpg(prompts, actor, reference, reward, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    advantage = batch_advantage(score, scale="informative")  # made up for groups whose scores are all equal
    learn(actor, reference, said, advantage, loss="reinforce", **rest)
