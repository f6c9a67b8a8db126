"""On-policy distillation: the student generates, and a teacher rates every token by its log-prob (arXiv 2306.08543)."""

from distflow.algo.options import GroupScale, NonNegative, TeacherKind
from distflow.flow import flow
from distflow.flows.nodes import task_advantage, teacher_advantage
from distflow.flows.policy_update import update_policy


@flow(constants_of=update_policy, optional_roles=("teacher", "reward"))
def distill(
    prompts,
    actor,
    reference,
    teacher,
    reward,
    *,
    by: TeacherKind = "teacher",  # or the moving average of the student's own weights (train.ema)
    task: NonNegative = 0.0,  # weight of the task's reward, relative to the group as in GRPO
    scale: GroupScale = "std",
    clip=0.2,
    dual_clip=3.0,
    **rest,
):
    rollout = actor.generate(prompts["prompt"])
    tokens, own = rollout["prompt_tokens", "response_tokens"], rollout["rollout_logprobs"]
    source = [prompts["data_source"]] if "data_source" in prompts.fields else []
    theirs = actor.ema_logprobs(tokens) if by == "ema" else teacher.logprobs(tokens, *source)
    gain = [task_advantage(reward.score(prompts, rollout), scale=scale)] if task else []
    advantage = teacher_advantage(own, theirs, *gain, field=theirs.fields[0], task=task)
    clips = {"clip": clip, "dual_clip": dual_clip}
    update_policy(actor, reference, rollout, advantage, loss="policy", **clips, **rest)
