"""REINFORCE++: returns whitened over the batch, leaving the reference has a price; no critic (arXiv 2501.03262)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import returns, whitened


@flow(also=learn)
def reinforce_pp(prompts, actor, reference, reward, *, gamma=1.0, kl_reward=0.0, clip=0.2, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    ref = [reference.logprobs(said["prompt_tokens", "response_tokens"])] if kl_reward else []
    advantage = whitened(returns(score, said["rollout_logprobs"], *ref, gamma=gamma, kl=kl_reward))
    learn(actor, reference, said, advantage, *ref, loss="policy", clip=clip, **rest)
