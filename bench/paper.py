"""The paper, figure by figure: what was published, what our simulator predicts, and what we measure in small.

    python bench/paper.py [--measure | --measured FILE] [--svg DIR] [--markdown]

Predictions take a minute and need nothing. `--measure` also runs bench/scaling.py on one to four hosts (network
namespaces, so it needs root, and a few minutes of the whole machine); `--measured` takes what it wrote with `--json`.
`--svg` draws the figures as the paper arranges them. Rows are fitted or tested (bench/paper_rows.py); `within_15` and
`worst` are of those that nothing was fitted on. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paper_rows import LEFT_OUT, OWN, PUBLISHED, THEIRS, predicted_rows, setting
from plot import Chart, svg
from simulator import MISS, Row, as_json, table

LARGE = 0.4  # an error beyond it needs a named reason
# Published at a batch of 4096, each relative to the one before.
ABLATION = {"local": 1.38, "balance": 1.58 / 1.38, "double_buffer": 1.69 / 1.58}
TEXT_SAMPLES = 4096
SCALING = Path(__file__).parent / "scaling.py"
Points = dict[str, list[tuple[float, float]]]


def ablation(measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the parts of the data plane give: published, predicted and measured; None where it was not."""
    run = replace(setting("grpo", "7b", 32), prompts=TEXT_SAMPLES // 8)
    balance = replace(run, balance=False).run()[0].step_s / run.run()[0].step_s
    local = None
    if measured:
        rows = measured["rows"]
        hosts = max((h for h in rows if "colocated" in rows[h]), key=int)
        local = rows[hosts]["every byte moves"]["s"] / rows[hosts]["colocated"]["s"]
    found = {"local": (None, local), "balance": (balance, None), "double_buffer": (None, None)}
    return {
        name: {"published": round(ABLATION[name], 2), "predicted": _rounded(p), "measured_data_plane": _rounded(m)}
        for name, (p, m) in found.items()
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of the rows that nothing was fitted on, and of all."""
    tested = [r for r in rows if not r.fit]
    groups = list(dict.fromkeys(r.source for r in rows))
    worst = max(tested, key=lambda r: abs(r.error))
    return {
        "rows": len(rows),
        "tested": len(tested),
        "within_15": sum(abs(r.error) <= MISS for r in tested),
        "within_15_of_all": sum(abs(r.error) <= MISS for r in rows),
        "beyond_40": sum(abs(r.error) > LARGE for r in tested),
        "worst": {"row": f"{worst.source}: {worst.what}", "ratio": round(1 + worst.error, 2)},
        "groups": {
            g: f"{sum(r.source == g and abs(r.error) <= MISS for r in tested)} of {sum(r.source == g for r in tested)}"
            for g in groups
        },
        "left_out": {name: why for name, (_, why) in LEFT_OUT.items()},
        "left_out_rows": sum(count for count, _ in LEFT_OUT.values()),
    }


def measure(folder: Path) -> dict[str, Any]:
    """Runs the small steps over hosts, beside a single controller."""
    file = folder / "scaling.json"
    subprocess.run([sys.executable, str(SCALING), "--quick", "--json", str(file)], check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def named(rows: Iterable[Row], source: str, model: str) -> Points:
    """Returns published and predicted lines of a figure: system → (x, y)."""
    lines: Points = {}
    for row in rows:
        if row.source == source and row.what.startswith(f"{model}, "):
            point, _, system = row.what.removeprefix(f"{model}, ").partition(": ")
            x = float(point.split()[0].rstrip("k"))
            lines.setdefault(system, []).append((x, row.published))
            lines.setdefault(f"{system}, predicted", []).append((x, row.predicted))
    return lines


def weak(rows: Sequence[Row], model: str) -> Points:
    """Returns the lines of weak scaling, in thousands of tokens per second."""
    points = {int(g): rate for g, rate in PUBLISHED["vlm_weak_scaling_distflow"][model].items()}
    first = min(points)
    predicted = [(float(first), points[first])]
    for row in rows:
        if row.source == "Images, weak scaling" and row.what.startswith(f"{model}, "):
            gpus = int(row.what.split(" to ")[1].split()[0])
            predicted.append((float(gpus), row.predicted * points[first] * gpus / first))
    linear = [(float(g), points[first] * g / first) for g in points]
    return {OWN: [(float(g), r) for g, r in points.items()], f"{OWN}, predicted": predicted, "linear": linear}


def figures(rows: Sequence[Row], measured: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the drawings by name, models side by side as in the paper."""
    models = ("7b", "32b", "72b")
    dashed = (f"{THEIRS}, predicted", f"{OWN}, predicted", "linear")
    drawn: dict[str, list[Chart]] = {}
    for name, source, y, x in (
        ("grpo", "GRPO", "thousands of tokens per second", "GPUs"),
        ("ppo", "PPO", "thousands of tokens per second", "GPUs"),
        ("long-contexts", "Long contexts", "tokens per second and GPU", "thousands of tokens"),
    ):
        drawn[name] = [Chart(f"{source}, {m.upper()}", x, y, named(rows, source, m), dashed) for m in models]
    y = "thousands of tokens per second, models with images"
    drawn["weak-scaling"] = [Chart(f"Weak scaling, {m.upper()}", "GPUs", y, weak(rows, m), dashed) for m in models]
    if measured:
        drawn["measured"] = [_in_small(measured)]
    return {f"paper-{name}.svg": svg(charts) for name, charts in drawn.items()}


def _in_small(measured: Mapping[str, Any]) -> Chart:
    compute = measured["compute_s"]
    lines: Points = {OWN: [], "single controller": []}
    for hosts, row in measured["rows"].items():
        if "controller" in row and int(hosts) > 1:
            lines[OWN].append((float(hosts), row["every byte moves, compute"]["s"]))
            lines["single controller"].append((float(hosts), row["controller"]["s"] + compute))
    about = f"seconds of a step, links of {measured['rate']}, compute as published"
    return Chart("Measured in small", "hosts of two workers", about, lines)


def markdown(rows: Sequence[Row]) -> str:
    """Returns a table for each figure: a line for each point, both systems side by side."""
    out: list[str] = []
    for source in dict.fromkeys(r.source for r in rows):
        out.append(f"\n{source}\n")
        points: dict[str, dict[str, Row]] = {}
        for row in (r for r in rows if r.source == source):
            point, _, system = row.what.rpartition(": ")
            points.setdefault(point, {})[system] = row
        systems = list(dict.fromkeys(s for p in points.values() for s in p))
        head = [f"{s}, published | predicted | ratio" for s in systems]
        out += [f"| | {' | '.join(head)} |", "| --- " * (1 + 3 * len(systems)) + "|"]
        for point, found in points.items():
            cells = [_cells(found[s]) if s in found else "out of memory | | " for s in systems]
            out.append(f"| {point} | {' | '.join(cells)} |")
    return "\n".join(out)


def _cells(row: Row) -> str:
    ratio = f"{1 + row.error:.2f}"
    ratio = f"*{ratio}*" if row.fit else ratio if row.verdict == "ok" else f"**{ratio}**"
    return f"{row.published:.3g} | {row.predicted:.3g} | {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--measured", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="DIR")
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/paper.md instead")
    args = parser.parse_args()
    measured: dict[str, Any] | None = json.loads(args.measured.read_text()) if args.measured else None
    if args.measure:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(Path(folder))
    rows = predicted_rows()
    print(markdown(rows) if args.markdown else table(rows))
    if args.svg:
        for name, drawing in figures(rows, measured).items():
            (args.svg / name).write_text(drawing)
    found = summary(rows)
    print(f"\n{found['within_15']} of {found['tested']} rows that nothing was fitted on are within {100 * MISS:.0f} %.")
    result = found | {
        "ablation": ablation(measured),
        "speedup_vs_controller": measured["speedup_vs_controller"] if measured else None,
        "weak_scaling": {
            "predicted": {r.what: round(r.predicted, 3) for r in rows if r.source == "Images, weak scaling"},
            "measured": measured["efficiency"] if measured else None,
        },
    }
    print(json.dumps(result | {"predictions": [as_json(r) for r in rows]}))


if __name__ == "__main__":
    main()
