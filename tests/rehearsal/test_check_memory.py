"""The memory that `distflow check --memory` predicts: from short models as from the whole, and near the estimate."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoConfig

from distflow.cli import main
from distflow.config.loading import make_config
from distflow.config.model_shape import load_model
from distflow.device.choices import choose, given
from distflow.device.footprint import ROLLOUT, Phase, phases_of
from distflow.device.offer import Offer
from distflow.errors import ConfigError
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.rehearsal.check import config_from, offer_for, shape_source
from distflow.rehearsal.memory import phases_of_worker
from distflow.rollout.builtin.continuous_batch import ContinuousBatch
from distflow.run.choosing import placed
from distflow.run.program import Program
from distflow.train import fsdp

GIB = 1 << 30
H100 = Offer("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, True)
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "num_hidden_layers": 9,
}


def program(tmp_path: Path, *overrides: str, **sections: Any) -> Program:
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
    data = {"files": "data.jsonl", "fields": ["prompt"], "batch": 128}
    raw = {"flow": "grpo", "data": data, "model": {"arch": "qwen2"}, "reward": "reward.py:score"}
    return Program(make_config(raw | sections, overrides, tmp_path, "the config", "test"))


def tiny_source() -> Source:
    return Source("tiny", AutoConfig.for_model("qwen2", **TINY), train_tokenizer(iter(["text"]), 0))


SMALL = ("train.micro_tokens=2048", "rollout.max_tokens=128", "data.max_prompt=64", "rollout.kv_cache_gb=0.1")


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("offload", ["none", "all"])
def test_two_short_models_tell_what_the_whole_one_needs(workers: int, offload: str, tmp_path: Path) -> None:
    given = program(tmp_path, *SMALL, f"train.offload={offload}", "train.dtype=bfloat16", "algo.kl=0.01")
    plan = given.plan(workers)
    with patch.object(fsdp, "UNIT", 1):  # as for a large model, every layer is gathered by itself
        whole, short = (phases_of_worker(given, given.config, tiny_source(), plan, 0, whole) for whole in (True, False))
    assert [p.name for p in whole] == [p.name for p in short]
    for expected, found in zip(whole, short, strict=True):
        close = 0.003 * expected.bytes  # how full the buckets of a weight sync are depends on the depth
        for part in expected.parts.keys() | found.parts.keys():
            assert found.parts.get(part, 0) == pytest.approx(expected.parts.get(part, 0), abs=close), part


def shapes_only(folder: Path, model: str) -> str:
    """Makes the folder of a model that has no weights; returns its name."""
    config_from(load_model(model)).save_pretrained(folder / model)
    return model


CASES = {
    "qwen2.5-0.5b on 1": ("qwen2.5-0.5b", 1),
    "qwen2.5-7b on 8": ("qwen2.5-7b", 8),
    "qwen2.5-32b on 8": ("qwen2.5-32b", 8),
    "qwen2.5-72b on 32": ("qwen2.5-72b", 32),
    "qwen2.5-72b on 64": ("qwen2.5-72b", 64),
}


@pytest.mark.parametrize("name", CASES)
def test_with_the_defaults_models_fit_and_the_estimate_that_chooses_them_is_right(name: str, tmp_path: Path) -> None:
    model, workers = CASES[name]
    opened, _ = placed(program(tmp_path, model=shapes_only(tmp_path, model)), workers, H100)
    assert opened.config.model
    plan, shape = opened.plan(workers), load_model(model)
    chosen = choose(opened.config, H100, plan, {"actor": shape}, lambda: "not here").config
    walked = {
        p.name: p
        for p in phases_of_worker(opened, chosen, shape_source(opened.config.model, opened), plan, 0)
        if not p.name.startswith(("load", "checkpoint", "weight sync"))
    }
    estimated: dict[str, Phase] = {p.name: p for p in phases_of(plan, 0, {"actor": shape}, *given(chosen))}
    assert walked.keys() == estimated.keys() - {"between steps"} == {"update of actor", ROLLOUT}
    for phase, walk in walked.items():
        assert walk.bytes < 0.95 * H100.memory
        assert estimated[phase].bytes == pytest.approx(walk.bytes, rel=0.1)


def test_activations_of_a_long_sequence_fall_as_the_ranks_that_divide_it(tmp_path: Path) -> None:
    long = ("rollout.max_tokens=16000", "data.max_prompt=64", "rollout.kv_cache_gb=0.1", "train.micro_tokens=2048")
    activations = {}
    for sp in (1, 2, 4):
        keys = (f"placement.default={{sp: {sp}}}", "train.dtype=bfloat16", "train.gradient_checkpointing=true")
        opened = program(tmp_path, *long, *keys)
        phases = phases_of_worker(opened, opened.config, tiny_source(), opened.plan(4), 0)
        update = next(p for p in phases if p.name == "update of actor")
        activations[sp] = update.parts["activations and gradients"]
    assert activations[1] / activations[2] == pytest.approx(2, rel=0.1)
    assert activations[1] / activations[4] == pytest.approx(4, rel=0.1)


def test_sequences_that_would_wait_for_others_are_not_walked(tmp_path: Path) -> None:
    opened = program(tmp_path, *SMALL, "rollout.kv_cache_gb=0.05", "rollout.max_sequences=1024")
    decode = ContinuousBatch._decode
    with patch.object(ContinuousBatch, "_decode", autospec=True, side_effect=decode) as decoded:
        phases_of_worker(opened, opened.config, tiny_source(), opened.plan(1), 0)
    assert decoded.call_count < 5  # instead of 35


def test_ranks_apart_have_phases_of_their_own(tmp_path: Path) -> None:
    apart = (
        "placement.ranks={r: 0, t: 1}",
        "placement.default={ranks: t}",
        "placement.nodes={actor.generate: {ranks: r}}",
    )
    opened = program(tmp_path, *SMALL, *apart)
    plan = opened.plan(2)
    generates, trains = (
        [p.name for p in phases_of_worker(opened, opened.config, tiny_source(), plan, rank)] for rank in (0, 1)
    )
    assert generates == ["load", "weight sync of actor", ROLLOUT]
    assert trains == ["load", "weight sync of actor", "update of actor", "checkpoint of actor"]


def test_the_command_names_phases_and_what_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        "flow: grpo\nmodel: {arch: qwen2, layers: 2}\ndata: {files: none.jsonl, fields: [prompt]}\n"
        "reward: reward.py:score\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["check", str(config), "--workers", "2", "--memory", "80GiB"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device    a device that is not here, 80.0 GiB each, 2 of them"
    assert any(line.startswith("  update of actor") and "context 3.0 GiB" in line for line in lines)
    assert lines[-1] == "memory    every phase fits into 95% of 80.0 GiB"


def test_what_does_not_fit_is_an_error_with_a_way_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
    config, model = tmp_path / "config.yaml", shapes_only(tmp_path, "qwen2.5-72b")
    config.write_text(
        f"flow: grpo\nmodel: {model}\ndata: {{files: none.jsonl, fields: [prompt]}}\nreward: reward.py:score\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["check", str(config), "placement.nodes={actor.generate: {tp: 1}}", "--workers=8", "--memory", "80GiB"])
    assert ended.value.code == 2
    assert "raise tp of actor.generate (placement.nodes.actor.generate.tp)" in " ".join(capfd.readouterr().err.split())


def test_a_size_that_cannot_be_read_is_refused() -> None:
    assert offer_for("80GB").memory == 80 * 10**9
    assert offer_for("24").memory == 24 * GIB
    for size in ("much", "8 parsecs", "1.2.3GiB"):
        with pytest.raises(ConfigError, match="write a size such as 80GiB"):
            offer_for(size)
    with pytest.raises(ConfigError, match="no accelerator here; say how large yours are"):
        offer_for("")
