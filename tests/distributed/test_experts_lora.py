"""A LoRA adapter of a mixture of experts: its attention learns, and what is exported loads and knows it."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.test_lora import exported
from warm import distflow_run

CONFIG: dict[str, Any] = {
    "flow": "sft",
    "data": {"files": "data.jsonl", "batch": 16},  # all rows in every step
    "steps": 16,
    "model": {"arch": "qwen3_moe", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "experts": 4, "ffn": 32},
    "train": {"lr": 3e-2, "lora": {"rank": 8}},
    "wait_limit_s": 60,
}


def test_it_learns_and_the_exports_load(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} is", "response": "odd" if i % 2 else "even"} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The base model has learned which letters there are, so that what attention does is seen.
    for name, changes in (
        ("base", {"steps": 10, "train": {"lr": 1e-2}}),
        ("run", {"model": str(tmp_path / "saved")}),
    ):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(tmp_path / name)} | changes))
        ended = distflow_run(path, workers=2)
        assert ended.codes == [0, 0], ended.err
        if name == "base":
            assert exported(tmp_path / "base", tmp_path / "saved") == 0
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-16:]
    losses = [m["actor/loss"] for m in metrics]
    assert losses[-1] < 0.95 * losses[0]
    assert exported(tmp_path / "run", tmp_path / "merged") == 0
    assert exported(tmp_path / "run", tmp_path / "adapter", "--adapter") == 0
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    text = tokenizer("3 isodd", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        known = float(merged(**text, labels=text.input_ids).loss)
        start = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        untrained = float(start(**text, labels=text.input_ids).loss)
        adapted = PeftModel.from_pretrained(start, tmp_path / "adapter")
        with_adapter = float(adapted(**text, labels=text.input_ids).loss)
    assert known != untrained
    assert abs(with_adapter - known) < 1e-4
