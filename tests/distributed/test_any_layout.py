"""Whatever the layout, a run has the same curves and samples the same tokens."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from warm import Ended, distflow_run

STEPS, FEWER = 5, 3
CURVES = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl", "actor/entropy", "response_length/mean")
FLOW = """
import json

from distflow import flow, node
from distflow.weights import sync
from distflow.flows.dapo import dapo
from distflow.flows.grpo import grpo
from distflow.flows.ppo import ppo

sync._BUCKET = 1 << 14  # so that weights are sent in several exchanges, as those of a large model are


@node(writes=())
def keep(batch, ctx):
    tokens = {int(i): row.tolist() for i, row in zip(batch.ids, batch["response_tokens"], strict=True)}
    with open(ctx.folder / f"tokens.{ctx.rank}.jsonl", "a") as file:
        file.write(json.dumps(tokens) + "\\n")


class Tapped:
    def __init__(self, actor):
        self.logprobs, self.update, self._generate = actor.logprobs, actor.update, actor.generate

    def generate(self, prompts):
        rollout = self._generate(prompts)
        keep(rollout["response_tokens"])
        return rollout


@flow
def tapped_ppo(prompts, actor, critic, reference, reward):
    ppo.fn(prompts, Tapped(actor), critic, reference, reward, kl_in_reward=0.05, lam=0.9, mini_batches=2)


@flow
def tapped_dapo(prompts, actor, reference, reward, *, rounds=1):
    overlong = {"overlong_limit": 16, "overlong_buffer": 8}
    dapo.fn(
        prompts, Tapped(actor), reference, reward, max_gen_batches=rounds, rollout_correction="token", **overlong
    )


@flow
def tapped(prompts, actor, reference, reward, *, kl=0.0, recompute_old_logprobs=False, mini_batches=1, epochs=1):
    constants = {"recompute_old_logprobs": recompute_old_logprobs, "mini_batches": mini_batches, "epochs": epochs}
    grpo.fn(prompts, Tapped(actor), reference, reward, kl=kl, **constants)
"""
REWARD = """
def digits(solution_str):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def any_digit(solution_str):
    return float(any(c in "1234" for c in solution_str))
"""
PROMPTS = [f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?" for i in range(24)]
CONFIG: dict[str, Any] = {
    "flow": "flow.py:tapped",
    "data": {"files": "data.jsonl", "batch": 8},
    "steps": STEPS,
    "algo": {"kl": 0.01},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 16},
    "train": {"lr": 1e-3},
    "reward": "reward.py:digits",
    "wait_limit_s": 60,
}
MODELS = ("actor", "reference")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"roles": {role: {"tp": 2} for role in MODELS}}),
    "dp2 tp2": (4, {"roles": {role: {"tp": 2} for role in MODELS}}),
    "dp2 sp2": (4, {"default": {"sp": 2}}),  # of what divides sequences; all else has four replicas
    "generate tp2": (4, {"nodes": {"actor.generate": {"tp": 2}}}),
    "split": (
        4,
        {
            "ranks": {"rollout": "0-1", "train": "2-3"},
            "default": {"ranks": "train"},
            "nodes": {"actor.generate": {"ranks": "rollout"}, "reward.score": {"ranks": "rollout"}},
        },
    ),
}


@dataclass(frozen=True)
class Run:
    metrics: list[dict[str, float]]  # of each step
    tokens: dict[int, list[int]]  # of each sample
    out: str
    parts: bool  # tensor parallelism adds up parts of products


def run(folder: Path, name: str, workers: int, start: Callable[..., Ended] = distflow_run, **changes: Any) -> Run:
    path, run_dir = folder / f"{name.replace(' ', '-')}.yaml", folder / name.replace(" ", "-")
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    ended = start(path, workers=workers)
    assert ended.codes == [0] * workers, ended.err
    tokens: dict[int, list[int]] = {}
    for file in run_dir.glob("tokens.*.jsonl"):
        for line in file.read_text().splitlines():
            for sample, response in json.loads(line).items():
                assert tokens.setdefault(int(sample), response) == response  # ranks of a replica agree
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Run(lines, tokens, ended.out, parts='"tp":' in json.dumps(changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_inputs(tmp_path_factory.mktemp("layouts"))


def with_inputs(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    """One worker, one micro-batch."""
    return run(folder, "alone", 1)


def check_same(name: str, got: Run, want: Run, curves: tuple[str, ...] = CURVES, stale: bool = False) -> None:
    assert [m["step"] for m in got.metrics] == [m["step"] for m in want.metrics]
    for ours, theirs in zip(got.metrics, want.metrics, strict=True):
        for curve in curves:
            near = pytest.approx(theirs[curve], rel=1e-3, abs=1e-6)
            assert ours[curve] == near, (name, curve, ours["step"])
    assert got.tokens.keys() == want.tokens.keys()
    assert equal_tokens(name, got, want) >= 0.999
    if not stale:
        check_mismatch(got)


def equal_tokens(name: str, got: Run, want: Run) -> float:
    """Returns the share of tokens of all samples that are the same in both."""
    pairs = [(got.tokens[i], want.tokens[i]) for i in want.tokens]
    total = sum(max(len(a), len(b)) for a, b in pairs)
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    print(f"{name}: {equal} of {total} tokens equal ({equal / total:.4%})")
    return equal / total


def check_mismatch(run: Run) -> None:
    """The rollout engine and the trainer agree on the log-probs of the same tokens, to the bit where they can."""
    assert all(m["rollout/mismatch_max"] <= (1e-4 if run.parts else 0) for m in run.metrics)


def test_one_worker_learns(alone: Run) -> None:
    """Otherwise the comparisons with it would mean little."""
    assert [m["step"] for m in alone.metrics] == list(range(1, STEPS + 1))
    assert sorted(alone.tokens) == list(range(STEPS * 8 * 4))
    assert all(m["actor/grad_norm"] > 0 for m in alone.metrics)
    assert any(m["actor/kl"] > 1e-4 for m in alone.metrics)
    assert all(math.isfinite(m[c]) for m in alone.metrics for c in CURVES)
    assert len({len(t) for t in alone.tokens.values()}) > 1  # not all of one length
    check_mismatch(alone)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_gives_the_same_run(folder: Path, alone: Run, name: str) -> None:
    workers, placement = LAYOUTS[name]
    check_same(name, run(folder, name, workers, placement=placement), alone)


@pytest.mark.parametrize(("shard", "tp"), [(2, 1), (1, 2)])
def test_hybrid_sharding_gives_the_same_run(folder: Path, alone: Run, shard: int, tp: int) -> None:
    name, train = f"hybrid {shard} {tp}", {"lr": 1e-3, "shard_degree": shard}
    placement = {"roles": {role: {"tp": tp} for role in MODELS}, "nodes": {"actor.generate": {"tp": 2}}}
    check_same(name, run(folder, name, 4, placement=placement, train=train), alone)


OTHERS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, tuple[int, dict[str, Any]]]]] = {
    "ppo": (  # changes of the config, curves, layouts
        {"flow": "flow.py:tapped_ppo", "critic": {"lr": 1e-2}, "algo": {}},
        ("reward/mean", "response_length/mean", "critic/loss", "critic/grad_norm", "critic/explained_variance"),
        {
            "ppo dp2": (2, {}),
            "ppo dp2 tp2": (4, {"roles": {r: {"tp": 2} for r in (*MODELS, "critic")}}),
            "ppo sp2 tp2": (4, {"roles": {"actor": {"sp": 2, "tp": 2}, "reference": {"tp": 2}, "critic": {"sp": 4}}}),
            "ppo, critic apart": (
                3,
                {"ranks": {"a": "0-1", "c": "2"}, "default": {"ranks": "a"}, "roles": {"critic": {"ranks": "c"}}},
            ),
        },
    ),
    "dapo": (
        {"flow": "flow.py:tapped_dapo", "reward": "reward.py:any_digit", "algo": {"rounds": 3}},
        (
            "sampling/discarded",
            "sampling/filled",
            "rollout/correction",
            "reward/trained_mean",
            "reward/overlong_penalty",
        ),
        {
            "dapo dp2": (2, {}),
            "dapo tp2": (2, {"roles": {"actor": {"tp": 2}}}),
            "dapo generate tp2": (4, {"nodes": {"actor.generate": {"tp": 2}}}),
        },
    ),
    "adapter": (
        {"train": {"lr": 2e-2, "lora": {"rank": 3}}},  # 3: of its rows, two workers have 2 and 1
        ("reward/mean", "response_length/mean", "actor/kl"),
        {
            "adapter dp2": (2, {}),
            "adapter sp2": (2, {"roles": {"actor": {"sp": 2}}}),
            "adapter dp2, generate tp2": (2, {"nodes": {"actor.generate": {"tp": 2}}}),
            "adapter, generate apart": (
                2,
                {
                    "ranks": {"rollout": "0", "train": "1"},
                    "default": {"ranks": "train"},
                    "nodes": {"actor.generate": {"ranks": "rollout"}},
                },
            ),
        },
    ),
}


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Run]:
    return {name: run(folder, name, 1, steps=FEWER, **changes) for name, (changes, _, _) in OTHERS.items()}


@pytest.mark.parametrize(("flow", "layout"), [(f, name) for f, (_, _, layouts) in OTHERS.items() for name in layouts])
def test_any_layout_gives_the_same_run_with_a_critic_dynamic_sampling_or_an_adapter(
    folder: Path, others: dict[str, Run], flow: str, layout: str
) -> None:
    changes, curves, layouts = OTHERS[flow]
    workers, placement = layouts[layout]
    got = run(folder, layout, workers, placement=placement, steps=FEWER, **changes)
    check_same(layout, got, others[flow], ("actor/loss", "actor/grad_norm", "actor/entropy", *curves))


@pytest.mark.parametrize("flow", ["ppo", "adapter"])
def test_hybrid_sharding_gives_the_same_run_with_a_critic_or_an_adapter(
    folder: Path, others: dict[str, Run], flow: str
) -> None:
    changes, curves, _ = OTHERS[flow]
    sections = {key: {**changes.get(key, CONFIG["train"]), "shard_degree": 2} for key in ("train", "critic")}
    if flow == "adapter":
        del sections["critic"]
    got = run(folder, f"hybrid {flow}", 4, steps=FEWER, **(changes | sections))
    check_same(f"hybrid {flow}", got, others[flow], ("actor/loss", "actor/grad_norm", "actor/entropy", *curves))


def test_ranks_that_divide_sequences_train_while_others_generate_ahead(folder: Path) -> None:
    """Also with hybrid sharding of the four, two of which divide each sequence."""
    apart = {"nodes": {"actor.generate": {"ranks": "rollout"}, "reward.score": {"ranks": "rollout"}}}

    def placement(last: int, sp: int) -> dict[str, Any]:
        return {"ranks": {"rollout": "0", "train": f"1-{last}"}, "default": {"ranks": "train", "sp": sp}, **apart}

    rollout = {"n": 4, "max_tokens": 16, "staleness": 1}
    want = run(folder, "ahead", 2, steps=FEWER, rollout=rollout, placement=placement(1, 1))
    train = {"lr": 1e-3, "shard_degree": 2}
    got = run(folder, "ahead sp2", 5, steps=FEWER, rollout=rollout, placement=placement(4, 2), train=train)
    check_same("ahead sp2", got, want, stale=True)
    assert [m["rollout/staleness"] for m in got.metrics] == [m["rollout/staleness"] for m in want.metrics]


def test_dynamic_sampling_replaced_prompts_and_kept_the_batch_full(others: dict[str, Run]) -> None:
    metrics, tokens = others["dapo"].metrics, others["dapo"].tokens
    assert sum(m["sampling/discarded"] for m in metrics) > 0
    assert len(tokens) == FEWER * 8 * 4
    assert max(tokens) // 4 + 1 == sum(8 + m["sampling/discarded"] for m in metrics)  # the stream, without a gap


def test_an_adapter_starts_as_the_reference_and_departs_from_it(alone: Run, others: dict[str, Run]) -> None:
    drift = [m["actor/kl"] for m in others["adapter"].metrics]
    assert drift[0] == pytest.approx(0, abs=1e-6)
    assert drift[-1] > 1e-4
    assert others["adapter"].metrics[0]["reward/mean"] == alone.metrics[0]["reward/mean"]


@pytest.mark.parametrize("share", [2, 8])
def test_any_size_of_micro_batches_gives_the_same_run(folder: Path, alone: Run, share: int) -> None:
    tokens = 32 * (20 + 16) // 2  # about what each of two workers has in a step
    got = run(folder, f"micro {share}", 2, train={"lr": 1e-3, "micro_tokens": tokens // share})
    check_same(f"1/{share} of the tokens at once", got, alone)


def test_several_updates_of_a_step_are_the_same_on_two_workers(folder: Path) -> None:
    """With recomputed old log-probs, and tensor parallelism in training."""
    algo = {"kl": 0.01, "recompute_old_logprobs": True, "mini_batches": 2, "epochs": 2}
    want = run(folder, "updates", 1, algo=algo, steps=3)
    placement = {"nodes": {"actor.update": {"tp": 2}, "actor.logprobs": {"tp": 2}}}
    check_same("updates of a step", run(folder, "updates halved", 2, algo=algo, steps=3, placement=placement), want)
    assert all(m["actor/ppo_kl"] != 0 for m in want.metrics)  # the weights change within a step
