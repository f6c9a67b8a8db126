"""Whole GRPO steps: 8 prompts × 8 responses, a tiny Qwen2 in float32, two workers of one thread; ours and the peers'.

    python bench/step.py [--rounds 2] [--steps 5] [--only ours,trl] [--work even,ragged] [--peers DIR]

  even     every response has 128 tokens
  kl       the same, with a penalty for moving away from a reference model
  ragged   a response ends where the model ends it, after 256 tokens at the latest; about 40 on average

Ours is `distflow run` on a config, as a user would; its times are those of its metrics.jsonl. The peers are scripts in
bench/peers, `trl_step.py` and so on, each run in its environment in --peers (`trl`, `verl05`, `siirl`); what is missing
is null. They take turns, round after round. verl and siiRL run with and without the all-reduce for every token that
Hugging Face's `generate` does under FSDP, and the better counts.
Medians over all steps but the first two of a run. The last line is one JSON object.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from frameworks import PEERS, PROMPTS, SAMPLES, WARM_UP, WORK, WORKERS, Runs, absent, prepare, run_ours, run_peer
from matmul import fraction

HERE = Path(__file__).resolve().parent


def measure(
    args: argparse.Namespace, folder: Path
) -> tuple[dict[str, dict[str, dict[str, Runs]]], dict[str, list[dict[str, float]]], dict[str, str]]:
    """work → framework → variant → runs; work → what the matmul limit is in each round; and notes."""
    found: dict[str, dict[str, dict[str, Runs]]] = {w: {} for w in args.work}
    limits: dict[str, list[dict[str, float]]] = {w: [] for w in args.work}
    notes: dict[str, str] = {}
    assets = {chars: folder / ("chars" if chars else "tokens") for chars in {WORK[w].ragged for w in args.work}}
    prompt = {chars: prepare(place, chars) for chars, place in assets.items()}
    for i in range(args.rounds):
        for w in args.work:
            work = WORK[w]
            for name in args.only:
                if name == "ours":
                    runs = {"": run_ours(work, assets[work.ragged], i, args)}
                    reached, gflops = _of_matmul(runs[""], assets[work.ragged], prompt[work.ragged], args.matmul_s)
                    limits[w].append({"matmul_frac": reached, "gflops": gflops})
                elif why := absent(name, work, args):
                    notes[f"{w}, {name}"] = why
                    continue
                else:
                    runs = run_peer(name, work, assets[work.ragged], args)
                    if not runs:
                        notes[f"{w}, {name}"] = "failed"
                for variant, run in runs.items():
                    all_rounds = found[w].setdefault(name, {}).setdefault(variant, Runs())
                    for key in ("step_s", "cpu_s", "tokens", "more"):
                        getattr(all_rounds, key).extend(getattr(run, key))
                    all_rounds.versions = run.versions
                    cpu = f"{statistics.median(run.cpu_s):.2f}" if run.cpu_s else "–"
                    label = f"{name} {variant}".strip()
                    print(f"  round {i + 1}, {w}: {label} {run.s:.2f} s ({cpu} CPU s)", flush=True)
    return found, limits, notes


def _of_matmul(run: Runs, assets: Path, prompt: float, seconds: float) -> tuple[float, float]:
    sequences = PROMPTS * SAMPLES
    response = statistics.mean(run.tokens) / sequences
    return fraction(assets, WORKERS, sequences, prompt, response, run.more[-1]["update_s"], seconds)


def versus(rows: dict[str, dict[str, Runs]]) -> dict[str, float | None]:
    """How many times faster ours is than each peer in the better of its variants; and than it is without our help."""
    ours = rows.get("ours", {}).get("")
    found: dict[str, float | None] = {}
    for name in PEERS:
        theirs = rows.get(name, {}).values()
        found[f"vs_{name}"] = round(min(r.s for r in theirs) / ours.s, 3) if ours and theirs else None
    for name in ("verl", "siirl"):
        shipped = rows.get(name, {}).get("PEER_NO_SYNC=0")
        found[f"vs_{name}_as_shipped"] = round(shipped.s / ours.s, 3) if ours and shipped else None
    for name in PEERS:
        theirs = rows.get(name, {}).values()
        cpu = min((statistics.median(r.cpu_s) for r in theirs), default=None)
        mine = statistics.median(ours.cpu_s) if ours and ours.cpu_s else None
        found[f"vs_{name}_cpu"] = round(cpu / mine, 3) if cpu and mine else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(*known: str) -> dict[str, Any]:
        def read(text: str) -> list[str]:
            words = text.split(",")
            for word in words:
                if word not in known:
                    raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(known)}")
            return words

        return {"type": read, "default": list(known), "help": f"some of {','.join(known)}"}

    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help=f"of a run, after {WARM_UP} to warm up")
    parser.add_argument("--only", **several("ours", *PEERS))
    parser.add_argument("--work", **several(*WORK))
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of the peers' environments")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of our config")
    parser.add_argument("--limit-s", type=float, default=900, help="for one run")
    parser.add_argument("--matmul-s", type=float, default=3, help="to measure the limit of matmul")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and what was started is ended
    with tempfile.TemporaryDirectory() as folder:
        found, limits, notes = measure(args, Path(folder))

    head = f"{'':7s} {'':22s} {'step, s':>9s} {'min':>7s} {'CPU s':>7s} {'tokens':>8s} {'tokens/s':>9s}"
    print(head)
    for w, rows in found.items():
        for name, variants in rows.items():
            for variant, runs in variants.items():
                r = runs.summary()
                cpu = f"{r['cpu_s']:7.2f}" if r["cpu_s"] is not None else f"{'–':>7s}"
                label = f"{name} {variant}".strip()
                times = f"{r['s']:9.3f} {r['min_s']:7.3f} {cpu}"
                print(f"{w:7s} {label:22s} {times} {r['tokens']:8.0f} {r['tokens_per_s']:9.0f}")
        ratios = "  ".join(f"{k} {v}" for k, v in versus(rows).items() if v is not None)
        if ratios:
            print(f"{w:7s} {ratios}")
    for what, why in notes.items():
        print(f"{what}: {why}")

    def middle(w: str, key: str) -> float | None:
        return round(statistics.median(row[key] for row in limits[w]), 3) if limits.get(w) else None

    overhead = {}
    for w in ("even", "ragged"):
        for runs in found.get(w, {}).get("ours", {}).values():
            overhead[w] = round(statistics.median(r["overhead_frac"] for r in runs.more), 4)
    every = [(n, r) for rows in found.values() for n, v in rows.items() for r in v.values()]
    result = {
        "even": versus(found.get("even", {})) | {"kl": versus(found.get("kl", {}))},
        "ragged": versus(found.get("ragged", {})),
        "overhead_frac": max(overhead.values(), default=None),
        "matmul_frac": middle("even", "matmul_frac"),
        "overhead_frac_of": overhead,
        "matmul_frac_of": {w: middle(w, "matmul_frac") for w in found},
        "matmul_gflops_per_process": {w: middle(w, "gflops") for w in found},
        "rounds": args.rounds,
        "steps": args.steps,
        "versions": {n: r.versions for n, r in every},
        "notes": notes,
        "raw": {
            w: {f"{n} {v}".strip(): r.summary() for n, vs in rows.items() for v, r in vs.items()}
            for w, rows in found.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
