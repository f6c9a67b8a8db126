"""GKD: a divergence from a teacher at every token, over the teacher's k likeliest ones (arXiv 2306.13649)."""

from typing import Any, Literal

from distflow.algo.options import Divergence, Fraction, NonNegative, PositiveCount, TeacherKind
from distflow.errors import FlowError
from distflow.flow import flow
from distflow.flows.nodes import group_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy, optional_roles=("teacher", "reward"))
def gkd(
    prompts,
    actor,
    reference,
    teacher,
    reward,
    *,
    k: PositiveCount = 64,
    divergence: Divergence = "reverse",
    beta: Fraction = 0.5,  # of jensen_shannon
    samples: Literal["own", "given"] = "own",  # given: the column `response`
    by: TeacherKind = "teacher",  # or the moving average of the student's own weights (train.ema)
    task: NonNegative = 0.0,  # weight of GRPO's loss on the task's reward, for own samples
    **rest,
):
    if (given := samples == "given") and task:
        raise FlowError(f"algo.task: {task}; responses of the data have no reward, only `samples: own` do")
    rollout = actor.encode(prompts["prompt", "response"]) if given else actor.generate(prompts["prompt"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    source = [prompts["data_source"]] if "data_source" in prompts.fields else []
    top = actor.ema_top_logprobs(tokens, k=k) if by == "ema" else teacher.top_logprobs(tokens, *source, k=k)
    constants: dict[str, Any] = {"divergence": divergence, "beta": beta}
    if given:
        actor.update(tokens, top, loss="gkd", **constants, **rest)
        return
    gain = [group_advantage(reward.score(prompts, rollout))] if task else []
    update_policy(actor, reference, rollout, top, *gain, loss="gkd", task=task, **constants, **rest)
