"""Runs in which some tokens of every response are not the model's: the same in any layout, and read as context only."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.curves import CONFIG, REWARD, ROWS
from warm import distflow_run

FLOW = """
import torch

from distflow import flow, node
from distflow.batch.batch import Ragged
from distflow.flows.nodes import gae, whiten_over_batch


@node(writes="response_mask")
def mask(batch, kind: str):
    column = batch["response_tokens"]
    values = torch.ones(int(column.lengths.sum()), dtype=torch.int8)
    if kind == "every_third":
        values[column.joined() % 3 == 0] = 0
    return Ragged.packed(values, column.lengths)


@flow
def masked_ppo(prompts, actor, critic, reference, reward, *, kind="none"):
    rollout = actor.generate(prompts["prompt"])
    score = reward.score(prompts, rollout)
    if kind != "none":
        mask(rollout["response_tokens"], kind=kind)  # the nodes below read what it writes
    tokens = rollout["prompt_tokens", "response_tokens"]
    old, ref, values = actor.logprobs(tokens), reference.logprobs(tokens), critic.values(tokens)
    estimates = gae(score, values, old, ref, kl=0.05)
    updates = {"mini_batches": 2, "epochs": 1}
    critic.update(tokens, values, estimates["returns"], clip=0.2, **updates)
    advantage = whiten_over_batch(estimates)
    options = {"rollout_correction": "icepop-token", "aggregate": "seq-mean-token-mean", "kl": 0.05}
    actor.update(tokens, rollout["rollout_logprobs"], old, ref, advantage, loss="policy", **options, **updates)
"""
NAMES = ("loss", "grad_norm", "entropy", "pg_loss", "kl", "vf_loss", "value", "mean", "mismatch_kl", "correction")


def curves(folder: Path, kind: str, workers: int) -> dict[str, list[float]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(REWARD)
    (folder / "flow.py").write_text(FLOW)
    name = f"{kind}-{workers}"
    config: dict[str, Any] = {"flow": "flow.py:masked_ppo", "algo": {"kind": kind}, "run_dir": str(folder / name)}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(CONFIG | config | {"steps": 2}))
    ended = distflow_run(path, workers=workers)
    assert set(ended.codes) == {0}, ended.err
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {n: [step[n] for step in steps] for n in steps[-1] if n.rpartition("/")[2] in NAMES}


def test_a_mask_in_a_run(tmp_path: Path) -> None:
    without, ones = curves(tmp_path, "none", 1), curves(tmp_path, "ones", 1)
    assert {"actor/loss", "critic/vf_loss", "actor/kl", "rollout/correction", "advantage/mean"} <= without.keys()
    assert ones == without  # to the bit
    alone, two = curves(tmp_path, "every_third", 1), curves(tmp_path, "every_third", 2)
    assert alone["actor/loss"] != without["actor/loss"]
    for name, curve in alone.items():
        assert two[name] == pytest.approx(curve, rel=1e-3, abs=2e-5), name
