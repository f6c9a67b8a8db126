"""DAPO: GRPO with more room upwards, useless prompts replaced and long responses marked down (arXiv 2503.14476)."""

from distflow.flow import flow
from distflow.flows.learn import learn
from distflow.flows.nodes import group_advantage, informative, mark_down_long


@flow(also=learn)
def dapo(
    prompts,
    actor,
    reference,
    reward,
    *,
    clip=0.2,
    clip_high=0.28,
    rounds=10,  # at most so many batches are drawn to fill one
    long=0,  # tokens; a response this long loses `long_penalty`; 0: never
    long_buffer=0,  # so many tokens before, it begins to lose some of it
    long_penalty=1.0,
    **rest,
):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    informative(score, refill=rounds)  # what follows sees a full batch of groups whose scores differ
    if long:
        told = {"limit": long, "buffer": long_buffer, "penalty": long_penalty}
        score = mark_down_long(score, said["response_tokens"], **told)
    advantage = group_advantage(score, of="shaped_score" if long else "score")
    learn(actor, reference, said, advantage, loss="policy", clip=clip, clip_high=clip_high, **rest)
