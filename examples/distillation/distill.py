"""On-policy distillation: the student generates, and a teacher rates every token of it by its own log-prob."""

from distflow import Batch, Context, Ragged, flow, node


@node(role="advantage", writes="advantage")
def teacher_advantage(batch: Batch, ctx: Context) -> Ragged:
    """The reward of a token is log teacher − log student: on average, minus the reverse KL divergence."""
    student, teacher = batch["rollout_logprobs"], batch["teacher_logprobs"]
    advantage = teacher.joined() - student.joined()
    ctx.metrics.log("distill/reverse_kl", float(-advantage.mean()), len(advantage))
    return Ragged.packed(advantage, student.lengths)


@flow
def distill(prompts, actor, teacher):
    rollout = actor.generate(prompts["prompt"])
    tokens = rollout["prompt_tokens", "response_tokens"]
    advantage = teacher_advantage(rollout["rollout_logprobs"], teacher.logprobs(tokens))
    actor.update(tokens, rollout["rollout_logprobs"], advantage, loss="policy")
