"""The paper, figure by figure: what was published, what our simulator predicts, and what we measure in small.

    python bench/paper.py [--measure | --measured FILE …] [--svg DIR] [--markdown]

Predictions take a minute and need nothing. `--measure` also runs bench/in_small.py (network namespaces, so it needs
root, and some minutes of the whole machine); `--measured` takes what it wrote with `--json`, in one file or several.
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

from paper_rows import HOST, LEFT_OUT, OWN, PUBLISHED, THEIRS, predicted_rows, setting
from plot import Chart, svg
from simulator import MISS, Row, as_json, table

LARGE = 0.4  # an error beyond it needs a named reason
# Published at a batch of 4096, each relative to the one before.
ABLATION = {"local": 1.38, "balance": 1.58 / 1.38, "double_buffer": 1.69 / 1.58}
TEXT_SAMPLES = 4096
IN_SMALL = Path(__file__).parent / "in_small.py"
WEAK = "Images, weak scaling"
Points = dict[str, list[tuple[float, float]]]


def ablation(measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the parts of the data plane give: published, predicted and measured; None where it was not."""
    run = replace(setting("grpo", "7b", 32), prompts=TEXT_SAMPLES // 8)
    predicted = {"balance": replace(run, balance=False).run()[0].step_s / run.run()[0].step_s}
    without = {"local": "without the local path", "balance": "without balance"}
    parts = measured["parts"] if measured else {}

    def gain(name: str, suffix: str) -> float | None:
        with_it, without_it = f"whole{suffix}", without.get(name, "") + suffix
        return _rounded(parts[without_it] / parts[with_it]) if {with_it, without_it} <= parts.keys() else None

    return {
        name: {
            "published": round(published, 2),
            "predicted": _rounded(predicted.get(name)),
            "measured": gain(name, ""),
            "measured_data_plane": gain(name, ", no compute"),
        }
        for name, published in ABLATION.items()
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
    """Runs the small steps over hosts, beside a single controller and verl's data plane."""
    file = folder / "in_small.json"
    subprocess.run([sys.executable, str(IN_SMALL), "--json", str(file)], check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Returns what several runs of bench/in_small.py have measured, each some of it."""
    result: dict[str, Any] = {}
    for file in files:
        for key, value in json.loads(file.read_text()).items():
            result[key] = result.get(key, {}) | value if isinstance(value, dict) else value
    return result


def ahead(rows: Sequence[Row], figure: str, measured: Mapping[str, Any]) -> Points:
    """Returns how far steps are ahead of one controller, by hosts: of 7B as published and predicted, and in small."""
    lines = named(rows, figure, "7b")
    host = {name: {gpus / HOST: y for gpus, y in line} for name, line in lines.items()}
    found = {
        f"7B {kind}": [(h, rate / host[THEIRS + suffix][h]) for h, rate in host[OWN + suffix].items()]
        for kind, suffix in (("published", ""), ("predicted", ", predicted"))
    }
    for key, name in (("speedup_vs_verl", "verl's data plane"), ("speedup_vs_controller", "our controller")):
        ratios = measured[key].get(figure, {})
        found[f"in small, {name}"] = [(float(h), ratio) for h, ratio in ratios.items()]
    return found


def efficiencies(rows: Sequence[Row], measured: Mapping[str, Any]) -> Points:
    """Returns weak scaling by hosts, relative to the fewest: of 7B with images, and of steps in small."""
    found: Points = {}
    for row in (r for r in rows if r.source == WEAK and r.what.startswith("7b")):
        first, gpus = (int(word) for word in row.what.split() if word.isdigit())
        for kind, value in (("published", row.published), ("predicted", row.predicted)):
            found.setdefault(f"7B {kind}", [(first / HOST, 1.0)]).append((gpus / HOST, value))
    for name, points in measured["weak_scaling"].items():
        found[f"in small, {name}"] = [(float(h), value) for h, value in points.items()]
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
        if row.source == WEAK and row.what.startswith(f"{model}, "):
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
        drawn["measured"] = _in_small(rows, measured)
    return {f"paper-{name}.svg": svg(charts) for name, charts in drawn.items()}


def _in_small(rows: Sequence[Row], measured: Mapping[str, Any]) -> list[Chart]:
    y = f"step of one controller over ours; in small: links of {measured['rate']}"
    charts = [Chart(f"{f}: ahead of one controller", "hosts", y, ahead(rows, f, measured)) for f in ("GRPO", "PPO")]
    charts.append(
        Chart("Weak scaling", "hosts", "throughput of a worker, of the fewest hosts", efficiencies(rows, measured))
    )
    return [replace(c, lines={k: v for k, v in c.lines.items() if v}, dashed=_predicted(c)) for c in charts]


def _predicted(chart: Chart) -> tuple[str, ...]:
    return tuple(name for name in chart.lines if "predicted" in name)


def together(rows: Sequence[Row], measured: Mapping[str, Any]) -> str:
    """Returns a table by hosts: published and predicted of 7B, and measured in small."""
    out = []
    for title, lines in (
        *((f"{f}: ahead of one controller", ahead(rows, f, measured)) for f in ("GRPO", "PPO")),
        ("Weak scaling", efficiencies(rows, measured)),
    ):
        columns = {name: dict(line) for name, line in lines.items() if line}
        hosts = sorted({h for line in columns.values() for h in line})
        out += [f"\n{title}\n", f"| hosts | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
        for h in hosts:
            cells = [f"{c[h]:.2f}" if h in c else "" for c in columns.values()]
            out.append(f"| {h:g} | {' | '.join(cells)} |")
    return "\n".join(out)


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
    parser.add_argument("--measured", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="DIR")
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/paper.md instead")
    args = parser.parse_args()
    measured = merged(args.measured) if args.measured else None
    if args.measure:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(Path(folder))
    rows = predicted_rows()
    print(markdown(rows) if args.markdown else table(rows))
    if measured:
        print(together(rows, measured))
    if args.svg:
        for name, drawing in figures(rows, measured).items():
            (args.svg / name).write_text(drawing)
    found = summary(rows)
    print(f"\n{found['within_15']} of {found['tested']} rows that nothing was fitted on are within {100 * MISS:.0f} %.")
    result = found | {
        "ablation": ablation(measured),
        "speedup_vs_controller": measured["speedup_vs_controller"] if measured else None,
        "speedup_vs_verl": measured["speedup_vs_verl"] if measured else None,
        "weak_scaling": {
            "predicted": {r.what: round(r.predicted, 3) for r in rows if r.source == WEAK},
            "measured": measured["weak_scaling"] if measured else None,
        },
    }
    print(json.dumps(result | {"predictions": [as_json(r) for r in rows]}))


if __name__ == "__main__":
    main()
