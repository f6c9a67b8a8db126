"""Conversations: what an environment said is context only, for advantages, returns, KL and lengths, in every flow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.context import Context
from distflow.flow import node
from distflow.flows import nodes
from distflow.observe.metrics import StepMetrics
from distflow.plan import Layout
from distflow.roles.actor import Actor
from flows.test_flows import ROLES, built_in, edges

BUSY = settings(deadline=None)
GENERATED = ["prompt_tokens", "response_tokens", "rollout_logprobs", "response", "finished"]


class Converser(Actor):
    @node(type="inference", writes=[*GENERATED, "response_mask"], generates=True)
    def generate(self, batch: Any, ctx: Any, temperature: float | None = None) -> dict[str, Any]:
        raise NotImplementedError  # only traced


def context() -> Context:
    return Context(0, 0, 1, Layout((0,), 1), 0, StepMetrics(), Path(), np.arange(9))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Batch, Batch]:
    """Returns samples with a mask, and the same ones without the tokens that it leaves out."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
    seed = draw(st.integers(0, 1 << 16))
    make = torch.Generator().manual_seed(seed)
    rows = [torch.tensor(m) for m in masks]
    fields = ("old_values", "rollout_logprobs", "ref_logprobs", "response_tokens", "raw_advantage")
    full = {f: [torch.randn(len(m), generator=make, dtype=torch.float64) for m in rows] for f in fields}
    moments = torch.tensor([[9.0, 0.3, 2.0]] * len(rows), dtype=torch.float64)
    score = {"score": torch.randn(len(rows), generator=make, dtype=torch.float64), "batch_moments": moments}
    masked: dict[str, Column] = {f: Ragged.of(values) for f, values in full.items()}
    bare: dict[str, Column] = {
        f: Ragged.of([v[m] for v, m in zip(values, rows, strict=True)]) for f, values in full.items()
    }
    masked["response_mask"] = Ragged.of([m.to(torch.int8) for m in rows])
    ids, groups = np.arange(len(rows)), np.arange(len(rows)) // 2
    return Batch(ids, groups, {**masked, **score}), Batch(ids, groups, {**bare, **score})


def own_values(batch: Batch, column: Ragged) -> list[float]:
    """Returns the values of the model's tokens; all others are 0."""
    mask = batch["response_mask"].joined().bool()
    values = column.joined()
    assert not values[~mask].any()
    return values[mask].tolist()


@BUSY
@given(conversations())
def test_estimates_are_those_of_the_models_tokens_alone(case: tuple[Batch, Batch]) -> None:
    """Values and rewards skip what an environment said: the next state is that of the next token of the model."""
    masked, bare = case
    for estimate in (
        lambda b: nodes.gae(b, gamma=0.9, lam=0.8, kl=0.3),
        lambda b: nodes.discounted_returns(b, gamma=0.9, kl=0.3),
    ):
        got, want = estimate(masked), estimate(bare)
        assert torch.equal(got.pop("moments"), want.pop("moments"))
        assert got.keys() == want.keys()
        for field, column in want.items():
            assert own_values(masked, got[field]) == column.joined().tolist()
            assert got[field].lengths.tolist() == masked["old_values"].lengths.tolist()
    assert torch.equal(nodes.kl_divergence(masked), nodes.kl_divergence(bare))


@BUSY
@given(conversations())
def test_gae_over_a_conversation_matches_the_recursion(case: tuple[Batch, Batch]) -> None:
    """δ_t = r_t + γ V_next − V_t and A_t = δ_t + γλ A_next, next being the next token that the model sampled."""
    batch, _ = case
    got = nodes.gae(batch, gamma=0.9, lam=0.8)["raw_advantage"]
    for i in range(len(batch)):
        mask, values = batch["response_mask"][i].tolist(), batch["old_values"][i].tolist()
        reward, next_value, advantage = float(batch["score"][i]), 0.0, 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                advantage = reward + 0.9 * next_value - values[t] + 0.9 * 0.8 * advantage
                reward, next_value = 0.0, values[t]
                assert float(got[i][t]) == pytest.approx(advantage, rel=1e-9, abs=1e-12)


@BUSY
@given(conversations())
def test_whitening_lengths_and_penalties_count_the_models_tokens(case: tuple[Batch, Batch]) -> None:
    masked, _ = case
    logs = context(), context()
    got, want = (nodes.whiten(b, ctx) for b, ctx in zip(case, logs, strict=True))
    assert own_values(masked, got) == want.joined().tolist()
    assert logs[0].metrics.totals == logs[1].metrics.totals  # type: ignore[attr-defined]
    options = {"baseline": "length_weighted", "scale": "none"}
    assert torch.equal(*(nodes.group_advantage(b, context(), **options) for b in case))
    assert torch.equal(*(nodes.overlong_penalty(b, context(), limit=3, buffer=2) for b in case))


RL = ["cispo", "cpgd", "dapo", "dr_grpo", "gpg", "grpo", "gspo", "opo", "ppo", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", [*RL, "remax", "rloo"])
def test_every_flow_passes_a_mask_on_where_there_is_one(name: str) -> None:
    function = built_in(name)
    constants: dict[str, Any] = {"kl": 0.1, "recompute_old_logprobs": True}
    constants |= {"kl_in_reward": 0.1} if "kl_in_reward" in function.constants else {}
    constants |= {"overlong_limit": 9} if name == "dapo" else {}
    graphs = [
        function.trace(("prompt",), {r: {**ROLES, "actor": actor}[r] for r in function.roles}, constants)
        for actor in (Converser, Actor)
    ]
    readers = {n.id for n in graphs[0].nodes if "response_mask" in n.reads}
    by_token = {"old_values", "raw_advantage", "response_tokens", "rollout_logprobs"}
    # Reward functions see the response as it is; all others that read a value of each token read the mask, too.
    scored = {n.id for n in graphs[0].nodes if n.id.startswith("reward.score")}
    assert readers == {n.id for n in graphs[0].nodes if by_token & set(n.reads)} - scored
    assert readers >= {"actor.update", "actor.logprobs", "reference.logprobs"}
    unmasked = {(w, f, r) for w, f, r in edges(graphs[0]) if f != "response_mask"}
    assert unmasked == edges(graphs[1])


@BUSY
@given(conversations(), st.integers(0, 1 << 16))
def test_rewards_of_turns_are_earned_where_the_turns_end(case: tuple[Batch, Batch], seed: int) -> None:
    """The recursion again: what the environment gave for turns is there, the rest of the score at the last token."""
    batch, _ = case
    make = torch.Generator().manual_seed(seed)
    given = [torch.randn(len(m), generator=make).double() * m for m in batch["response_mask"]]
    with_turns = Batch(batch.ids, batch.groups, {**batch.columns, "turn_rewards": Ragged.of(given)})
    got = nodes.gae(with_turns, gamma=0.9, lam=0.8)["raw_advantage"]
    returns = nodes.discounted_returns(with_turns, gamma=1.0)["raw_advantage"]
    for i in range(len(batch)):
        mask, values = batch["response_mask"][i].tolist(), batch["old_values"][i].tolist()
        rest, next_value, advantage = float(batch["score"][i] - given[i].sum()), 0.0, 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                advantage = rest + float(given[i][t]) + 0.9 * next_value - values[t] + 0.9 * 0.8 * advantage
                rest, next_value = 0.0, values[t]
                assert float(got[i][t]) == pytest.approx(advantage, rel=1e-9, abs=1e-12)
        if 1 in mask:  # without discount, the return of the first token is the score
            first = returns[i][mask.index(1)]
            assert float(first) == pytest.approx(float(batch["score"][i]), rel=1e-9, abs=1e-9)
