"""Two small learning curves that others publish, on their tasks by their metrics, from models that are here.

`python bench/published_curves.py reverse-text`: prime-rl's, .14 to .79 in 20 steps. A model of bytes, warmed up on
examples, three of four of which forget the tags, reverses short lines of this project's LICENSE.
`python bench/published_curves.py arithmetic --model runs/smollm2/model`: tinker-cookbook's, .66 to 1 in a few steps.
"""

import argparse
import json
import random
import re
import shutil
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import distflow

ROOT = Path(__file__).parents[1]
TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def similarity(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Scores how similar the text in the tags is to the answer: difflib's ratio, as the task's authors do."""
    said = [match[1] if (match := TAGGED.search(text)) else "" for text in completions]
    return [SequenceMatcher(None, text.strip(), right).ratio() for text, right in zip(said, answer, strict=True)]


def last_number(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """Scores 1 if the last whole number in a message is the answer."""
    said = [re.findall(r"-?\d+", c[-1]["content"].replace(",", ""))[-1:] for c in completions]
    return [float(numbers == [right]) for numbers, right in zip(said, answer, strict=True)]


def lines(rng: random.Random, longest: int) -> list[str]:
    """Returns pieces of the license of at most so many characters, in a shuffled order, each once."""
    words = re.findall(r"[A-Za-z,.;()]+", (ROOT / "LICENSE").read_text())
    pieces = {" ".join(words[i : i + n]) for i in range(len(words)) for n in (1, 2, 3)}
    fitting = sorted(piece for piece in pieces if 4 <= len(piece) <= longest)
    rng.shuffle(fitting)
    return fitting


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(out: Path, name: str, **config: Any) -> tuple[Path, list[dict[str, float]]]:
    """Trains; returns the exported model, and the metrics of each step."""
    result = distflow.run(**config, run_dir=str(out / name), checkpoint={"every": 0})
    return distflow.export(result, out / f"{name}-model"), result.metrics


def reverse_text(out: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    rng = random.Random(0)
    texts = lines(rng, args.longest)
    asked = [{"prompt": f"{text} -> ", "answer": text[::-1]} for text in texts]
    held_out, train = asked[:100], asked[100:]
    tags = [rng.random() < args.tagged for _ in train]
    examples = [
        {**row, "response": f"<reversed_text>{row['answer']}</reversed_text>" if tag else row["answer"]}
        for row, tag in zip(train, tags, strict=True)
    ]
    model, _ = trained(
        out,
        "warmup",
        flow="sft",
        model={"arch": "qwen2", "hidden": 128, "layers": 3, "heads": 4, "kv_heads": 4},
        data={"files": write(out / "examples.jsonl", examples), "batch": 64},
        train={"lr": 2e-3, "warmup": 20},
        steps=args.warmup,
        workers=args.workers,
    )
    _, metrics = trained(
        out,
        "rl",
        flow="grpo",
        model=str(model),
        data={"files": write(out / "train.jsonl", train), "batch": 8},  # as theirs: 128 responses a step, 16 a prompt
        rollout={"n": 16, "max_tokens": args.longest + 34},
        eval={"files": write(out / "held_out.jsonl", held_out), "every": 10, "temperature": 1.0},
        reward=similarity,
        train={"lr": args.lr or 1e-3},
        steps=20,
        seed=args.seed,
        workers=args.workers,
    )
    return metrics


def arithmetic(out: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    rng = random.Random(0)
    shown = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    pairs = [(a, b) for a in range(101) for b in range(101)]
    rng.shuffle(pairs)
    rows = [
        {"prompt": [*shown, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs
    ]
    model = args.model
    if args.warmup:
        examples = [{**row, "response": row["answer"]} for row in rows[5000:]]
        model, _ = trained(
            out,
            "warmup",
            flow="sft",
            model=model,
            data={"files": write(out / "examples.jsonl", examples), "batch": 32},
            train={"lr": 1e-5, "micro_tokens": 2048},
            steps=args.warmup,
            workers=args.workers,
        )
    _, metrics = trained(
        out,
        "rl",
        flow="grpo",
        model=str(model),
        data={"files": write(out / "train.jsonl", rows[:5000]), "batch": args.groups},
        rollout={"n": 4, "max_tokens": 8},
        reward=last_number,
        train={"lr": args.lr or 1e-5, "micro_tokens": 2048},
        steps=args.steps,
        seed=args.seed,
        workers=args.workers,
    )
    return metrics


TASKS = {"reverse-text": reverse_text, "arithmetic": arithmetic}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", type=Path, help="for arithmetic: a directory, by examples/smollm2/prepare.py")
    parser.add_argument("--warmup", type=int, default=300, help="steps of SFT before")
    parser.add_argument("--steps", type=int, default=12, help="of arithmetic")
    parser.add_argument("--groups", type=int, default=25, help="prompts a step of arithmetic; theirs: 100")
    parser.add_argument("--longest", type=int, default=20, help="characters of a text to reverse")
    parser.add_argument("--tagged", type=float, default=0.25, help="share of examples with the tags")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "published")
    args = parser.parse_args()
    out = args.out / f"{args.task}-{args.seed}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    metrics = TASKS[args.task](out, args)
    curve = [round(row["reward/mean"], 3) for row in metrics if "reward/mean" in row]
    held_out = {row["step"]: round(row["val/all/score"], 3) for row in metrics if "val/all/score" in row}
    print(json.dumps({"task": args.task, "seed": args.seed, "reward": curve, "held_out": held_out}))


if __name__ == "__main__":
    main()
