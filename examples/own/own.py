"""Many digits, but not always the same one: nodes, a judge, a loss, and flows of them."""

import torch

from distflow import flow, node
from distflow.algo.losses import finish
from distflow.flows.learn import learn
from distflow.flows.nodes import divergence, group_advantage


@node
def varied(batch):
    """A second reward: the share of different characters."""
    return [len(set(said)) / max(1, len(said)) for said in batch["response"]]


@node(whole_groups=True)
def worthwhile(batch, least=0.2):
    """A filter: where all responses to a prompt are about equally good, there is little to learn."""
    keep = torch.zeros(len(batch), dtype=torch.bool)
    for prompt in set(batch.groups):
        mine = batch.groups == prompt
        keep[mine] = batch["score"][mine].max() - batch["score"][mine].min() >= least
    return keep


@node(whole_groups=True)
def advantage(batch, ctx, variety=0.5, praise=0.5):
    """What a response is worth, less the median of all responses to its prompt."""
    worth = batch["score"] + variety * torch.tensor(batch["varied"]) + praise * batch["praise"]
    better = torch.zeros(len(batch))
    for prompt in set(batch.groups):
        mine = batch.groups == prompt
        better[mine] = worth[mine] - worth[mine].median()
    ctx.metrics.log("own/varied", sum(batch["varied"]) / len(batch), len(batch))
    return better


class Judge:
    """Praises what is better than usual, and remembers what is usual."""

    def __init__(self, pace=0.2):
        self.pace, self.usual = pace, 0.0

    @node(writes="praise", whole_batch=True)
    def praise(self, batch, ctx):
        praise = (batch["score"] > self.usual).float()
        self.usual += self.pace * (float(batch["score"].mean()) - self.usual)
        ctx.metrics.log("own/usual", self.usual)
        return praise


def my_loss(tokens, bad=0.5, **rest):
    """The policy gradient, but bad responses are unlearned more slowly than good ones are learned."""
    advantage = tokens["advantage"]
    weight = torch.where(advantage > 0, advantage, bad * advantage)
    return finish(tokens, -weight * tokens.logprobs, {"own/weight": weight.abs()}, **rest)


@flow(constants_of=learn)
def own(prompts, actor, reference, reward, judge, *, variety=0.5, bad=0.5, rounds=4, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    worthwhile(score, refill=rounds)  # further prompts are drawn until 8 are worth it, at most 4 × 8
    different = varied(said["response"])
    praise = judge.praise(score)
    better = advantage(score, different, praise, variety=variety)
    learn(actor, reference, said, better, loss="own.py:my_loss", bad=bad, **rest)


@flow(constants_of=learn)
def steered(prompts, actor, reference, reward, control, *, kl=1.0, **rest):
    said = actor.generate(prompts["prompt"])
    score = reward.score(prompts, said)
    ref = reference.logprobs(said["prompt_tokens", "response_tokens"])
    weight = control.weight(divergence(said["rollout_logprobs"], ref))
    better = group_advantage(score)
    learn(actor, reference, said, better, ref, weight, loss="policy", kl=kl, **rest)
