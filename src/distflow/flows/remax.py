"""ReMax: the baseline is the score of the greedy response to the prompt; no critic, no group (arXiv 2310.10505)."""

from distflow.flow import flow
from distflow.flows.nodes import greedy_baseline_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy)
def remax(prompts, actor, reference, reward, *, aggregate="seq-mean-token-sum-norm", **rest):
    rollout = actor.generate(prompts["prompt"])
    greedy = actor.generate(prompts["prompt"], temperature=0.0, prefix="greedy_")
    score = reward.score(prompts, rollout)
    baseline = reward.score(prompts, greedy, prefix="greedy_")
    advantage = greedy_baseline_advantage(score, baseline)
    update_policy(actor, reference, rollout, advantage, loss="reinforce", aggregate=aggregate, **rest)
