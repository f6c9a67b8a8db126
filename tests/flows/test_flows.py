"""The built-in flows as graphs: what they do, in which order, and that planning them needs no torch."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.algo import losses
from distflow.engine.roles import Actor, Critic, Reference, RewardModel
from distflow.flow import Flow, FlowFunction
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.reward.reward import Reward

PLAYERS = {"actor": Actor, "critic": Critic, "reference": Reference, "reward": Reward, "reward_model": RewardModel}


def built_in(name: str) -> FlowFunction:
    found = load(BUILT_IN[name], "flow", Path())
    assert isinstance(found, FlowFunction)
    return found


def graph(name: str, *columns: str, **constants: Any) -> Flow:
    function = built_in(name)
    return function.trace(columns, {r: PLAYERS[r] for r in function.roles}, constants)


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


def test_grpo_generates_scores_compares_and_learns() -> None:
    flow = graph("grpo", "prompt", "answer")
    assert [n.id for n in flow.order] == ["actor.generate", "reward.score", "group_advantage", "actor.update"]
    assert edges(flow) == GRPO
    assert {n.id: n.role for n in flow.nodes} == {
        "actor.generate": "actor",
        "reward.score": "reward",
        "group_advantage": "advantage",
        "actor.update": "actor",
    }
    assert [n.id for n in flow.nodes if n.hand_over] == ["actor.generate"]
    assert [n.id for n in flow.nodes if n.whole_groups] == ["group_advantage"]
    assert [(n.id, n.balance) for n in flow.nodes if n.balance] == [("actor.update", "response_tokens")]
    assert [n.id for n in flow.nodes if n.type == "train"] == ["actor.update"]


def test_the_reference_is_asked_only_if_its_word_has_weight() -> None:
    assert "reference.logprobs" not in {n.id for n in graph("grpo", "prompt", kl=0).nodes}
    flow = graph("grpo", "prompt", "answer", kl=0.01)
    asked = {("actor.generate", f, "reference.logprobs") for f in TOKENS}
    assert edges(flow) == GRPO | asked | {("reference.logprobs", "ref_logprobs", "actor.update")}
    assert flow.node("actor.update").params["kl"] == 0.01


def test_old_logprobs_may_come_from_the_trainer() -> None:
    flow = graph("grpo", "prompt", "answer", recompute_old=True)
    asked = {("actor.generate", f, "actor.logprobs") for f in TOKENS}
    assert edges(flow) == GRPO | asked | {("actor.logprobs", "old_logprobs", "actor.update")}
    order = [n.id for n in flow.order]
    assert order.index("actor.logprobs") < order.index("actor.update")


def test_constants_reach_the_nodes_they_are_for() -> None:
    given = {"scale": "none", "clip": 0.1, "clip_high": 0.3, "kl": 0.5, "kl_kind": "k2", "entropy": 0.01}
    flow = graph("grpo", "prompt", mini_batches=2, epochs=3, aggregate="seq-mean-token-mean", **given)
    assert flow.node("group_advantage").params == {"scale": given.pop("scale")}
    assert flow.node("actor.update").params == {
        "loss": "policy",
        "aggregate": "seq-mean-token-mean",
        "mini_batches": 2,
        "epochs": 3,
        **given,
    }


OWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # its loss; what it tells the advantage, the update
    "grpo": ("policy", {"scale": "std"}, {"clip": 0.2, "clip_high": None, "aggregate": "token-mean"}),
    "dr_grpo": ("policy", {"scale": "none"}, {"clip": 0.2, "aggregate": "seq-mean-token-sum-norm"}),
    "rloo": ("policy", {"scale": "none", "baseline": "others"}, {"clip": 0.2, "aggregate": "seq-mean-token-sum"}),
    "opo": ("reinforce", {"scale": "none", "baseline": "length"}, {"aggregate": "seq-mean-token-sum-norm"}),
    "gpg": ("reinforce", {"scale": "informative"}, {"aggregate": "token-mean"}),
    "reinforce_pp_baseline": ("policy", {"scale": "batch"}, {"clip": 0.2, "aggregate": "token-mean", "kl_kind": "k2"}),
    "gspo": ("gspo", {}, {"clip": 3e-4, "clip_high": 4e-4, "aggregate": "seq-mean-token-mean"}),
    "cispo": ("cispo", {}, {"clip": 1.0, "clip_high": 0.2, "aggregate": "token-mean"}),
    "cpgd": ("cpgd", {}, {"clip": 0.2, "drift": 0.001, "aggregate": "token-mean"}),
}


@pytest.mark.parametrize("name", OWN)
def test_what_is_its_own_in_each_of_the_family(name: str) -> None:
    flow = graph(name, "prompt", "answer", kl=0.1, epochs=2)
    loss, told, learned = OWN[name]
    advantage = next(n for n in flow.nodes if n.role == "advantage")
    assert advantage.params == told
    assert (
        advantage.whole_batch == (advantage.id == "batch_advantage") == (told.get("scale") in ("batch", "informative"))
    )
    assert ("response_tokens" in advantage.reads) == (told.get("baseline") == "length")
    update = flow.node("actor.update").params
    assert update["loss"] == loss
    assert {k: update[k] for k in learned} == learned
    assert (update["kl"], update["epochs"]) == (0.1, 2)
    assert "reference.logprobs" in {n.id for n in flow.nodes}
    taken = set(inspect.signature(getattr(losses, loss)).parameters)
    assert set(update) - {"loss", "aggregate", "mini_batches", "epochs"} <= taken


def test_sft_encodes_and_learns() -> None:
    flow = graph("sft", "prompt", "response")
    assert [n.id for n in flow.order] == ["actor.encode", "actor.update"]
    assert edges(flow) == {
        ("data", "prompt", "actor.encode"),
        ("data", "response", "actor.encode"),
        *(("actor.encode", f, "actor.update") for f in TOKENS),
    }
    assert flow.node("actor.update").params["loss"] == "nll"


def test_evaluation_learns_nothing() -> None:
    flow = graph("evaluate", "prompt", "answer", temperature=0.5, rows=7, n=3)
    assert [n.id for n in flow.order] == ["actor.generate", "reward.score", "report"]
    assert {n.type for n in flow.nodes} == {"inference", "compute"}
    assert flow.node("actor.generate").params == {"temperature": 0.5, "held_out": True}
    assert flow.node("report").params == {"rows": 7, "n": 3}
    assert set(flow.node("report").reads) == {"score", "response", "prompt"}
    assert "data_source" in graph("evaluate", "prompt", "data_source").node("report").reads


def test_ppo_asks_the_critic_and_teaches_it() -> None:
    flow = graph("ppo", "prompt", "answer", kl_reward=0.1, epochs=2, clip_value=0.3, lam=0.9)
    found = edges(flow)
    assert {
        ("critic.values", "old_values", "gae"),
        ("critic.values", "old_values", "critic.update"),
        ("gae", "returns", "critic.update"),
        ("gae", "moments", "over_all"),
        ("over_all", "spread", "whiten"),
        ("whiten", "advantage", "actor.update"),
        ("reference.logprobs", "ref_logprobs", "gae"),
    } <= found
    assert [n.id for n in flow.nodes].count("reference.logprobs") == 1
    assert flow.node("gae").params == {"gamma": 1.0, "lam": 0.9, "kl": 0.1}
    assert flow.node("critic.update").params == {"clip": 0.3, "mini_batches": 1, "epochs": 2}
    assert flow.node("actor.update").params["epochs"] == 2
    assert [n.id for n in flow.nodes if n.whole_batch] == ["over_all"]
    assert "reference.logprobs" not in {n.id for n in graph("ppo", "prompt").nodes}


def test_the_reference_is_asked_once_for_reward_and_loss() -> None:
    for name in ("ppo", "reinforce_pp"):
        flow = graph(name, "prompt", kl_reward=0.1, kl=0.1)
        assert ("reference.logprobs", "ref_logprobs", "actor.update") in edges(flow)
        assert [n.role for n in flow.nodes].count("reference") == 1


def test_remax_generates_twice_and_compares() -> None:
    flow = graph("remax", "prompt", "answer")
    assert {
        ("actor.generate_2", "greedy_response", "reward.score_2"),
        ("reward.score_2", "greedy_score", "better_than_greedy"),
        ("reward.score", "score", "better_than_greedy"),
    } <= edges(flow)
    assert flow.node("actor.generate_2").params == {"temperature": 0.0}
    assert not {"greedy_rollout_logprobs", "greedy_prompt_tokens"} & set(flow.node("reward.score_2").reads)


def test_dapo_fills_the_batch_before_anything_is_learned() -> None:
    flow = graph("dapo", "prompt", "answer", rounds=3, kl=0.1, long=100, long_buffer=20)
    order = [n.id for n in flow.order]
    assert order[:3] == ["actor.generate", "reward.score", "informative"]
    assert flow.drawn == {"actor.generate", "reward.score", "informative"}
    assert flow.node("informative").refill == 3
    assert ("mark_down_long", "shaped_score", "group_advantage") in edges(flow)
    assert flow.node("mark_down_long").params == {"limit": 100, "buffer": 20, "penalty": 1.0}
    assert "mark_down_long" not in {n.id for n in graph("dapo", "prompt").nodes}


@pytest.mark.parametrize(("name", "role"), [("dpo", "actor"), ("reward_model", "reward_model")])
def test_pairs_are_compared_in_one_place(name: str, role: str) -> None:
    flow = graph(name, "prompt", "chosen", "rejected")
    update = flow.node(f"{role}.update_pairs")
    assert update.whole_groups
    assert update.balance == "response_tokens"
    assert {*TOKENS, "preferred"} <= set(update.reads)
    assert update.params["aggregate"] == "seq-mean-token-sum"
    assert ("ref_logprobs" in update.reads) == (name == "dpo")


def test_a_correction_needs_the_log_probs_of_the_trainer_where_the_weights_change_within_a_step() -> None:
    asked = [n.id for n in graph("grpo", "prompt", correct="token").nodes]
    assert "actor.logprobs" not in asked  # the first update knows them
    flow = graph("grpo", "prompt", correct="token", correct_limit=3.0, epochs=2)
    assert ("actor.logprobs", "old_logprobs", "actor.update") in edges(flow)
    assert (flow.node("actor.update").params["correct"], flow.node("actor.update").params["correct_limit"]) == (
        "token",
        3.0,
    )


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_flow_is_a_short_file(name: str) -> None:
    path = Path(inspect.getfile(built_in(name).fn))
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(("name", "roles"), [("grpo", ["actor", "reference", "reward"]), ("sft", ["actor"])])
def test_every_other_parameter_is_a_constant(name: str, roles: list[str]) -> None:
    assert built_in(name).roles == roles
    assert built_in(name).constants["aggregate"] == "token-mean"


@pytest.mark.parametrize("flow", sorted(BUILT_IN))
def test_planning_imports_no_torch(tmp_path: Path, flow: str) -> None:
    pairs = flow in ("dpo", "reward_model")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} if pairs else {"prompt": "a", "response": "b"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    config: dict[str, Any] = {
        "flow": flow,
        "data": {"files": "data.jsonl", "batch": 4, **({"fields": ["prompt"]} if flow != "sft" and not pairs else {})},
        "model": "any/model",
        "reward": "reward.py:never_loaded",
        "eval": "data.jsonl",
        "workers": 2,
        **({"algo": {"kl": 0.1, "recompute_old": True}} if flow == "grpo" else {}),
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    code = (
        "import sys; from distflow.config import load_config; from distflow.plan.table import render;"
        "c = load_config(sys.argv[1]); render(c.plan(2)); c.eval_plan(2, 3);"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'tokenizers'})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)
