"""The built-in flows as graphs: their nodes, edges and constants, and that planning them imports no torch."""

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from distflow.algo import losses
from distflow.batch.batch import Batch, Column, Ragged
from distflow.errors import DataError, FlowError
from distflow.flow import Flow, FlowFunction
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.flows.ema_baseline import EmaBaseline
from distflow.flows.nodes import desirable, discounted_returns, group_advantage, mismatched, mismatched_log_ratio
from distflow.reward.reward import Reward
from distflow.roles.actor import Actor
from distflow.roles.critic import Critic
from distflow.roles.frozen import FrozenModel, Reference, Teachers
from distflow.roles.reward_model import RewardModel
from limits import load_factor

ROLES = {
    "actor": Actor,
    "critic": Critic,
    "ema_baseline": EmaBaseline,
    "reference": Reference,
    "reward": Reward,
    "reward_model": RewardModel,
}


def built_in(name: str) -> FlowFunction:
    function = load(BUILT_IN[name], "flow", Path())
    assert isinstance(function, FlowFunction)
    return function


def graph(name: str, *columns: str, **constants: Any) -> Flow:
    function = built_in(name)
    return function.trace(columns, {r: ROLES[r] for r in function.roles}, constants)


def traced(name: str, roles: Mapping[str, type], *columns: str, **constants: Any) -> Flow:
    """Traces a flow with these roles, besides the actor and the reference."""
    return built_in(name).trace(columns, {"actor": Actor, "reference": Reference, **roles}, constants)


def edges(flow: Flow) -> set[tuple[str, str, str]]:
    """(writer, field, reader)"""
    return {(flow.writer[f], f, n.id) for n in flow.nodes for f in n.reads}


TOKENS = ("prompt_tokens", "response_tokens")
GRPO = {
    ("data", "prompt", "actor.generate"),
    ("data", "prompt", "reward.score"),
    ("data", "answer", "reward.score"),
    ("actor.generate", "response", "reward.score"),
    ("actor.generate", "response_tokens", "reward.score"),
    ("reward.score", "score", "group_advantage"),
    ("group_advantage", "advantage", "actor.update"),
    ("actor.generate", "prompt_tokens", "actor.update"),
    ("actor.generate", "response_tokens", "actor.update"),
    ("actor.generate", "rollout_logprobs", "actor.update"),
}


def test_grpo_generates_scores_compares_and_updates() -> None:
    flow = graph("grpo", "prompt", "answer")
    assert [n.id for n in flow.order] == ["actor.generate", "reward.score", "group_advantage", "actor.update"]
    assert edges(flow) == GRPO
    assert {n.id: n.role for n in flow.nodes} == {
        "actor.generate": "actor",
        "reward.score": "reward",
        "group_advantage": "advantage",
        "actor.update": "actor",
    }
    assert [n.id for n in flow.nodes if n.generates] == ["actor.generate"]
    assert [n.id for n in flow.nodes if n.whole_groups] == ["group_advantage"]
    assert [(n.id, n.balance) for n in flow.nodes if n.balance] == [("actor.update", "response_tokens")]
    assert [n.id for n in flow.nodes if n.type == "train"] == ["actor.update"]


def test_the_reference_runs_only_with_a_kl_weight() -> None:
    assert "reference.logprobs" not in {n.id for n in graph("grpo", "prompt", kl=0).nodes}
    flow = graph("grpo", "prompt", "answer", kl=0.01)
    read = {("actor.generate", f, "reference.logprobs") for f in TOKENS}
    assert edges(flow) == GRPO | read | {("reference.logprobs", "ref_logprobs", "actor.update")}
    assert flow.node("actor.update").params["kl"] == 0.01


def test_old_logprobs_may_come_from_the_trainer() -> None:
    flow = graph("grpo", "prompt", "answer", recompute_old_logprobs=True)
    read = {("actor.generate", f, "actor.logprobs") for f in TOKENS}
    assert edges(flow) == GRPO | read | {("actor.logprobs", "old_logprobs", "actor.update")}
    order = [n.id for n in flow.order]
    assert order.index("actor.logprobs") < order.index("actor.update")


def test_later_updates_of_a_step_compare_with_the_log_probs_of_the_rollout() -> None:
    assert "old_logprobs" not in graph("grpo", "prompt").node("actor.update").params  # on-policy
    for name in ("grpo", "ppo", "gspo"):
        assert graph(name, "prompt", mini_batches=2).node("actor.update").params["old_logprobs"] == "rollout_logprobs"
    recomputed = graph("grpo", "prompt", mini_batches=2, recompute_old_logprobs=True)
    assert "old_logprobs" not in recomputed.node("actor.update").params


def test_constants_reach_the_nodes_they_are_for() -> None:
    constants = {"scale": "none", "clip": 0.1, "clip_high": 0.3, "dual_clip": 5.0, "kl": 0.5, "kl_estimator": "k2"}
    constants["entropy"] = 0.01
    flow = graph("grpo", "prompt", mini_batches=2, epochs=3, aggregate="seq-mean-token-mean", **constants)
    assert flow.node("group_advantage").params == {"scale": constants.pop("scale")}
    assert flow.node("actor.update").params == {
        "loss": "policy",
        "aggregate": "seq-mean-token-mean",
        "mini_batches": 2,
        "epochs": 3,
        "old_logprobs": "rollout_logprobs",
        **constants,
    }


DIFFERENCES: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # loss; parameters of the advantage; some of the update
    "grpo": ("policy", {"scale": "std"}, {"clip": 0.2, "clip_high": None, "aggregate": "token-mean"}),
    "dr_grpo": ("policy", {"scale": "none"}, {"clip": 0.2, "aggregate": "seq-mean-token-sum-norm"}),
    "rloo": (
        "policy",
        {"scale": "none", "baseline": "leave_one_out"},
        {"clip": 0.2, "aggregate": "seq-mean-token-sum"},
    ),
    "opo": ("reinforce", {"scale": "none", "baseline": "length_weighted"}, {"aggregate": "seq-mean-token-sum-norm"}),
    "gpg": ("reinforce", {"scale": "nonzero_std"}, {"aggregate": "token-mean"}),
    "reinforce_pp_baseline": (
        "policy",
        {"scale": "batch"},
        {"clip": 0.2, "aggregate": "token-mean", "kl_estimator": "k2"},
    ),
    "gspo": ("gspo", {}, {"clip": 3e-4, "clip_high": 4e-4, "aggregate": "seq-mean-token-mean"}),
    "cispo": ("cispo", {}, {"clip": 1.0, "clip_high": 0.2, "aggregate": "token-mean"}),
    "dcpo": ("dcpo", {}, {"clip": 0.16, "clip_high": 0.2, "aggregate": "seq-mean-token-mean"}),
    "cpgd": ("cpgd", {}, {"clip": 0.2, "drift": 0.001, "aggregate": "token-mean"}),
    "sapo": ("sapo", {}, {"tau": 1.0, "tau_negative": 1.05, "aggregate": "token-mean"}),
    "dppo": ("dppo", {}, {"clip": 0.2, "clip_high": None, "aggregate": "token-mean"}),
    "gmpo": ("gmpo", {}, {"clip": 0.4, "aggregate": "seq-mean-token-mean"}),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_distinguishes_each_policy_gradient_flow(name: str) -> None:
    flow = graph(name, "prompt", "answer", kl=0.1, epochs=2)
    loss, of_advantage, of_update = DIFFERENCES[name]
    advantage = next(n for n in flow.nodes if n.role == "advantage")
    assert advantage.params == of_advantage
    over_batch = of_advantage.get("scale") in ("batch", "nonzero_std")
    assert advantage.whole_batch == (advantage.id == "batch_advantage") == over_batch
    assert ("response_tokens" in advantage.reads) == (of_advantage.get("baseline") == "length_weighted")
    update = flow.node("actor.update").params
    assert update["loss"] == loss
    assert {k: update[k] for k in of_update} == of_update
    assert update.get("dual_clip") == {"policy": 3.0, "gspo": 3.0, "dcpo": 10.0}.get(loss)
    assert (update["kl"], update["epochs"]) == (0.1, 2)
    assert "reference.logprobs" in {n.id for n in flow.nodes}
    accepted = set(inspect.signature(getattr(losses, loss)).parameters)
    assert set(update) - {"loss", "aggregate", "mini_batches", "epochs", "old_logprobs"} <= accepted


def test_sft_encodes_and_updates() -> None:
    flow = graph("sft", "prompt", "response")
    assert [n.id for n in flow.order] == ["actor.encode", "actor.update"]
    assert edges(flow) == {
        ("data", "prompt", "actor.encode"),
        ("data", "response", "actor.encode"),
        *(("actor.encode", f, "actor.update") for f in TOKENS),
    }
    assert flow.node("actor.update").params["loss"] == "nll"


def test_evaluation_updates_nothing() -> None:
    flow = graph("evaluate", "prompt", "answer", temperature=0.5, n=3)
    assert [n.id for n in flow.order] == ["actor.generate", "reward.score", "report"]
    assert {n.type for n in flow.nodes} == {"inference", "compute"}
    assert flow.node("actor.generate").params == {"temperature": 0.5, "held_out": True}
    assert flow.node("report").params == {"n": 3}
    assert set(flow.node("report").reads) == {"score", "response", "prompt"}
    assert "data_source" in graph("evaluate", "prompt", "data_source").node("report").reads


def test_ppo_reads_values_of_the_critic_and_trains_it() -> None:
    flow = graph("ppo", "prompt", "answer", kl_in_reward=0.1, epochs=2, clip_value=0.3, lam=0.9)
    assert {
        ("critic.values", "old_values", "gae"),
        ("critic.values", "old_values", "critic.update"),
        ("gae", "returns", "critic.update"),
        ("gae", "moments", "merge_moments"),
        ("merge_moments", "batch_moments", "whiten"),
        ("whiten", "advantage", "actor.update"),
        ("reference.logprobs", "ref_logprobs", "gae"),
    } <= edges(flow)
    assert [n.id for n in flow.nodes].count("reference.logprobs") == 1
    assert flow.node("gae").params == {"gamma": 1.0, "lam": 0.9, "kl": 0.1}
    assert flow.node("critic.update").params == {"clip": 0.3, "mini_batches": 1, "epochs": 2}
    assert flow.node("actor.update").params["epochs"] == 2
    assert [n.id for n in flow.nodes if n.whole_batch] == ["merge_moments"]
    assert "reference.logprobs" not in {n.id for n in graph("ppo", "prompt").nodes}


def test_the_reference_runs_once_for_reward_and_loss() -> None:
    for name in ("ppo", "reinforce_pp"):
        flow = graph(name, "prompt", kl_in_reward=0.1, kl=0.1)
        assert ("reference.logprobs", "ref_logprobs", "actor.update") in edges(flow)
        assert [n.role for n in flow.nodes].count("reference") == 1


def test_remax_generates_twice_and_compares() -> None:
    flow = graph("remax", "prompt", "answer")
    assert {
        ("actor.generate_2", "greedy_response", "reward.score_2"),
        ("reward.score_2", "greedy_score", "greedy_baseline_advantage"),
        ("reward.score", "score", "greedy_baseline_advantage"),
    } <= edges(flow)
    assert flow.node("actor.generate_2").params == {"temperature": 0.0}
    assert not {"greedy_rollout_logprobs", "greedy_prompt_tokens"} & set(flow.node("reward.score_2").reads)


def test_dapo_fills_the_batch_before_the_update() -> None:
    flow = graph("dapo", "prompt", "answer", max_gen_batches=3, kl=0.1, overlong_limit=100, overlong_buffer=20)
    order = [n.id for n in flow.order]
    assert order[:3] == ["actor.generate", "reward.score", "nonzero_std"]
    assert flow.sampling_loop == {"actor.generate", "reward.score", "nonzero_std"}
    assert flow.node("nonzero_std").dynamic_sampling == 3
    assert ("overlong_penalty", "shaped_score", "group_advantage") in edges(flow)
    assert flow.node("overlong_penalty").params == {"limit": 100, "buffer": 20, "factor": 1.0}
    assert "overlong_penalty" not in {n.id for n in graph("dapo", "prompt").nodes}


@pytest.mark.parametrize(("name", "role"), [("dpo", "actor"), ("orpo", "actor"), ("reward_model", "reward_model")])
def test_pairs_are_compared_on_one_worker(name: str, role: str) -> None:
    flow = graph(name, "prompt", "chosen", "rejected")
    update = flow.node(f"{role}.update_pairs")
    assert update.whole_groups
    assert update.balance == "response_tokens"
    assert {*TOKENS, "preferred"} <= set(update.reads)
    assert update.params["aggregate"] == "seq-mean-token-sum"
    assert ("ref_logprobs" in update.reads) == (name == "dpo")


def test_with_several_updates_a_rollout_correction_needs_log_probs_of_the_trainer() -> None:
    one_update = graph("grpo", "prompt", rollout_correction="token")
    assert "actor.logprobs" not in {n.id for n in one_update.nodes}  # the update computes them itself
    bounds = {"correction_threshold": 3.0, "correction_lower": 0.5}
    flow = graph("grpo", "prompt", rollout_correction="token", **bounds, epochs=2)
    assert ("actor.logprobs", "old_logprobs", "actor.update") in edges(flow)
    update = flow.node("actor.update").params
    assert {k: update[k] for k in ("rollout_correction", *bounds)} == {"rollout_correction": "token", **bounds}
    assert "old_logprobs" not in update


@pytest.mark.parametrize(("name", "estimator"), [("ppo", "gae"), ("reinforce_pp", "discounted_returns")])
def test_the_kl_in_the_reward_is_of_the_old_log_probs_of_the_update(name: str, estimator: str) -> None:
    recomputed = graph(name, "prompt", kl_in_reward=0.1, recompute_old_logprobs=True, mini_batches=2)
    old = {(reader, field) for writer, field, reader in edges(recomputed) if writer == "actor.logprobs"}
    assert old == {(estimator, "old_logprobs"), ("actor.update", "old_logprobs")}
    assert [n.id for n in recomputed.nodes].count("actor.logprobs") == 1
    assert "old_logprobs" not in recomputed.node("actor.update").params
    of_rollout = graph(name, "prompt", kl_in_reward=0.1)
    assert ("actor.generate", "rollout_logprobs", estimator) in edges(of_rollout)
    no_penalty = graph(name, "prompt", recompute_old_logprobs=True)
    assert "old_logprobs" not in no_penalty.node(estimator).reads


def test_the_kl_in_the_reward_is_of_the_trainers_log_probs_if_there_are_any() -> None:
    columns: dict[str, Column] = {
        "score": torch.tensor([1.0]),
        "rollout_logprobs": Ragged.of([torch.tensor([-1.0, -2.0])]),
        "ref_logprobs": Ragged.of([torch.tensor([-1.5, -2.5])]),
    }
    batch = Batch(np.arange(1), np.arange(1), columns)
    assert discounted_returns(batch, kl=0.5)["raw_advantage"][0].tolist() == pytest.approx([0.5, 0.75])
    old = Ragged.of([torch.tensor([-1.5, -3.5])])
    recomputed = Batch(np.arange(1), np.arange(1), {**columns, "old_logprobs": old})
    assert discounted_returns(recomputed, kl=0.5)["raw_advantage"][0].tolist() == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_flow_is_a_short_file(name: str) -> None:
    path = Path(inspect.getfile(built_in(name).fn))
    assert len(path.read_text().splitlines()) < 60


def test_advantages_of_several_rewards_and_of_the_best_of_k() -> None:
    flow = graph("gdpo", "prompt", "answer")
    assert {
        ("reward.score_each", "scores", "summed_advantage"),
        ("reward.score_each", "score_weights", "summed_advantage"),
        ("summed_advantage", "advantage", "actor.update"),
    } <= edges(flow)
    assert flow.node("summed_advantage").whole_batch
    best = graph("max_at_k", "prompt", k=2, baseline="mean").node("best_of_k_advantage")
    assert best.whole_groups
    assert best.params == {"k": 2, "baseline": "mean"}


def test_kto_estimates_the_divergence_on_the_responses_of_other_prompts() -> None:
    flow = graph("kto", "prompt", "response", "label")
    assert {
        ("mismatched", "mismatched_response", "actor.encode_2"),
        ("actor.encode_2", "mismatched_response_tokens", "actor.logprobs"),
        ("actor.logprobs", "mismatched_old_logprobs", "mismatched_log_ratio"),
        ("mismatched_log_ratio", "log_ratio", "kl_baseline"),
        ("kl_baseline", "kl_baseline", "actor.update"),
        ("desirable", "desirable", "actor.update"),
    } <= edges(flow)
    ids, responses = np.array([7, 3, 5]), ["c", "a", "b"]
    assert mismatched(Batch(ids, ids, {"response": responses})) == ["a", "b", "c"]  # 3, 5, 7: each has the next one's
    assert desirable(Batch(ids, ids, {"label": [True, False, True]})).tolist() == [1, -1, 1]
    with pytest.raises(DataError, match="sample 3: the column 'label' is 1; it must be true or false"):
        desirable(Batch(ids, ids, {"label": [True, 1, True]}))
    ratios = mismatched_log_ratio(
        Batch(
            ids,
            ids,
            {
                "mismatched_old_logprobs": Ragged.of([torch.tensor(x) for x in ([-1.0, -2.0], [-1.0], [0.0])]),
                "mismatched_ref_logprobs": Ragged.of([torch.tensor(x) for x in ([-3.0, -2.0], [-0.5], [0.0])]),
            },
        )
    )
    assert ratios.tolist() == [2, -0.5, 0]


def test_distillation_reads_the_teacher_and_the_task() -> None:
    """Roles that a flow does not call need no implementation."""
    one = {"teacher": FrozenModel}
    flow = traced("distill", {"teacher": Teachers, "reward": Reward}, "prompt", "data_source", task=0.5)
    assert {
        ("teacher.logprobs", "teacher_logprobs", "teacher_advantage"),
        ("task_advantage", "task_advantage", "teacher_advantage"),
        ("data", "data_source", "teacher.logprobs"),
        ("teacher_advantage", "advantage", "actor.update"),
    } <= edges(flow)
    top = traced("gkd", one, "prompt", "data_source", k=8)
    for field in ("teacher_top_ids", "teacher_top_logprobs"):
        assert ("teacher.top_logprobs", field, "actor.update") in edges(top)
    assert "data_source" not in top.node("teacher.top_logprobs").reads
    given = traced("gkd", one, "prompt", "response", samples="given")
    assert [n.id for n in given.nodes] == ["actor.encode", "teacher.top_logprobs", "actor.update"]
    own = traced("gkd", {}, "prompt", by="ema")
    assert [n.id for n in own.nodes] == ["actor.generate", "actor.ema_top_logprobs", "actor.update"]
    with pytest.raises(FlowError, match="role 'teacher' has no implementation"):
        traced("gkd", {}, "prompt")
    with pytest.raises(FlowError, match=r"algo.task: 0.5; responses of the data have no reward"):
        traced("gkd", one, "prompt", "response", samples="given", task=0.5)


def test_tokens_of_high_covariance_and_the_target_of_the_entropy() -> None:
    clipped = graph("clip_cov", "prompt", share=0.01, low=0.5).node("actor.update").params
    assert (clipped["loss"], clipped["clip_cov"]) == ("policy", {"share": 0.01, "low": 0.5, "high": 5.0})
    punished = graph("kl_cov", "prompt", share=0.01, penalty=0.5).node("actor.update").params
    assert (punished["loss"], punished["kl_cov"], punished["penalty"]) == ("kl_cov", 0.01, 0.5)
    held = graph("grpo", "prompt", entropy_target=0.4, entropy_step=0.1).node("actor.update").params
    assert [held[f"entropy{k}"] for k in ("", "_target", "_step", "_max")] == [0.0, 0.4, 0.1, 1.0]
    assert "entropy_step" not in graph("grpo", "prompt", entropy_step=0.1).node("actor.update").params


def test_baselines_of_tokens_and_of_roles() -> None:
    assert {
        ("actor.energy", "energy", "optimal_token_advantage"),
        ("reward.score", "score", "optimal_token_advantage"),
        ("optimal_token_advantage", "advantage", "actor.update"),
    } <= edges(graph("otb", "prompt"))
    flow = graph("rae", "prompt", "data_source", decay=0.5)
    assert {
        ("data", "data_source", "ema_baseline.advantage"),
        ("ema_baseline.advantage", "advantage", "actor.update"),
    } <= edges(flow)
    assert flow.node("ema_baseline.advantage").params == {"decay": 0.5}
    assert flow.node("ema_baseline.advantage").whole_batch
    assert "data_source" not in graph("rae", "prompt").node("ema_baseline.advantage").reads


def test_a_group_may_be_divided_by_a_field() -> None:
    """As in hierarchical GRPO: a proposer is compared with proposers, a solver with solvers of the same problem."""
    ctx = SimpleNamespace(metrics=SimpleNamespace(log=lambda *_: None))
    score, groups = torch.tensor([1.0, 0.0, 5.0, 7.0, 2.0]), np.array([3, 3, 3, 3, 4])
    for parts in (["a", "a", "b", "b", "a"], torch.tensor([0, 0, 1, 1, 0])):
        batch = Batch(np.arange(5), groups, {"score": score, "part": parts})
        assert group_advantage(batch, ctx, scale="none", within="part").tolist() == [0.5, -0.5, -1, 1, 0]
        assert group_advantage(batch, ctx, scale="none").tolist() == [-2.25, -3.25, 1.75, 3.75, 0]


def test_the_baseline_of_a_role_is_of_the_scores_before_and_is_kept() -> None:
    logged: dict[str, float] = {}
    ctx = SimpleNamespace(metrics=SimpleNamespace(log=lambda name, value, *_: logged.update({name: value})))
    columns: dict[str, Column] = {"score": torch.tensor([1.0, 0.0, 3.0]), "data_source": ["b", "a", "b"]}
    batch = Batch(np.array([7, 5, 6]), np.array([7, 5, 6]), columns)
    first = EmaBaseline()
    assert EmaBaseline.advantage(first, batch, ctx, decay=0.5).tolist() == [1, 0, 3]
    # In the order of samples 3 comes before 1: (3 / 2 + 1) / 2.
    assert first.state() == {"baselines": {"a": 0.0, "b": 1.25}}
    assert logged["advantage/b/baseline"] == 1.25
    second = EmaBaseline()
    second.restore(first.state())
    assert EmaBaseline.advantage(second, batch, ctx, decay=0.5).tolist() == [-0.25, 0, 1.75]


def test_masks_of_the_policy_term() -> None:
    masks = {"mask_truncated": True, "mask_off_policy": 0.1, "top_entropy": 0.2, "rollout_rejection": "mean-k3"}
    flow = graph("grpo", "prompt", **masks, rejection_threshold=0.5, kl_unbiased=True, kl=0.1, kl_reference="ema")
    assert {
        ("actor.generate", "finished", "actor.update"),
        ("actor.entropy", "old_entropy", "actor.update"),
        ("actor.ema_logprobs", "ema_logprobs", "actor.update"),
    } <= edges(flow)
    assert "reference" not in {n.role for n in flow.nodes}
    update = flow.node("actor.update").params
    assert {k: update[k] for k in masks} == masks
    assert (update["rejection_threshold"], update["kl_unbiased"]) == (0.5, True)
    plain = graph("grpo", "prompt")
    assert not {*masks, "rejection_threshold", "kl_unbiased"} & set(plain.node("actor.update").params)
    assert {"finished", "old_entropy"}.isdisjoint(plain.node("actor.update").reads)


@pytest.mark.parametrize(("name", "roles"), [("grpo", ["actor", "reference", "reward"]), ("sft", ["actor"])])
def test_every_other_parameter_is_a_constant(name: str, roles: list[str]) -> None:
    assert built_in(name).roles == roles
    assert built_in(name).constants["aggregate"] == "token-mean"


@pytest.mark.parametrize("flow", sorted(BUILT_IN))
def test_planning_imports_no_torch(tmp_path: Path, flow: str) -> None:
    pairs = flow in ("dpo", "orpo", "reward_model")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} if pairs else {"prompt": "a", "response": "b", "label": True}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    config: dict[str, Any] = {
        "flow": flow,
        "data": {
            "files": "data.jsonl",
            "batch": 4,
            **({"fields": ["prompt"]} if flow not in ("sft", "kto") and not pairs else {}),
        },
        "model": "any/model",
        "reward": "reward.py:never_loaded",
        "eval": "data.jsonl",
        "workers": 2,
        **({"roles": {"teacher": {"model": "any/other"}}} if flow in ("distill", "gkd") else {}),
        **({"algo": {"kl": 0.1, "recompute_old_logprobs": True}} if flow == "grpo" else {}),
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    code = (
        "import sys; from distflow.plan.table import render; from distflow.run.program import Program;"
        "program = Program.load(sys.argv[1]); render(program.plan(2)); program.eval_plan(2, 3);"
        "slow = {'torch', 'transformers', 'tokenizers', 'huggingface_hub'};"
        "print(*slow & {m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60 * load_factor(),
    )
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)
