"""Evaluates a model on a held-out set: the flows of `eval` in a config and of `distflow eval`."""

from distflow.flow import flow
from distflow.flows.nodes import report


@flow
def evaluate(prompts, actor, reward, *, temperature=0.0, n=1):
    rollout = actor.generate(prompts["prompt"], temperature=temperature, held_out=True)
    score = reward.score(prompts, rollout)
    source = [prompts["data_source"]] if "data_source" in prompts.fields else []
    report(score, rollout["response"], prompts["prompt"], *source, n=n)


@flow
def evaluate_by_own_reward(prompts, actor, eval_reward, *, temperature=0.0, n=1):
    """Evaluates with a reward of its own (`eval.reward`)."""
    evaluate.fn(prompts, actor, eval_reward, temperature=temperature, n=n)
