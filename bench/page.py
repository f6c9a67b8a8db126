"""The page: how long it takes to open, how large it is as a file, and what recording costs a run.

    python bench/page.py

`open_s`: the slowest view of 1,000 steps × 8 workers × 2,000 samples, from the request to the finished picture in
Chromium; `fleet_open_s`: the timeline of a simulated step of 1,024 workers; `html_mib`: the first run as one file;
`recording_overhead_frac`: the share of a step that two workers of a GRPO run spend in the recorder. The last line is
one JSON object.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

STEPS, WORKERS, SAMPLES, FLEET = 1000, 8, 2000, 1024
CONFIG = """
flow: grpo
model: {arch: qwen2, hidden: 256, layers: 4, heads: 4, vocab: 258}
data: {files: prompts.jsonl, batch: 8}
reward: reward.py:score
rollout: {n: 8, max_tokens: 128, min_tokens: 128}
train: {lr: 1.0e-5}
steps: 6
run_dir: run
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = {"steps": STEPS, "workers": WORKERS, "samples": SAMPLES, "fleet": FLEET, **recording(folder)}
        numbers |= opening(folder)
    print(json.dumps(numbers))


def opening(folder: Path) -> dict[str, Any]:
    """Opens the views of a long run, and a step of many workers, in a browser."""
    from distflow.page.html_file import html_file
    from distflow.page.run_folder import RunFolder
    from recorded import write_run

    run = write_run(folder / "long", STEPS, WORKERS, SAMPLES // STEPS, tokens=200)
    fleet = write_run(folder / "fleet", 2, FLEET, 0)
    html = html_file([RunFolder(run)])
    (folder / "run.html").write_text(html)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium here: nothing is opened")
        return {"html_mib": len(html) / (1 << 20)}
    views = {
        view: opened(run, view, chromium) for view in ("overview", "plan", "timeline", "traffic", "curves", "samples")
    }
    print("  ".join(f"{view} {s:.2f} s" for view, s in views.items()))
    return {
        "open_s": max(views.values()),
        "views_s": views,
        "scroll_s": opened(run, "samples", chromium, scroll),
        "fleet_open_s": opened(fleet, "timeline", chromium),
        "html_open_s": opened_at((folder / "run.html").as_uri(), "overview", chromium),
        "html_mib": len(html) / (1 << 20),
    }


def opened(run: Path, view: str, chromium: str, act: Callable[[Any], None] | None = None) -> float:
    """Returns the seconds until a view of a fresh server is shown in a fresh browser; then of `act`, if given."""
    command = [sys.executable, "-m", "distflow", "show", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address is not None
        return opened_at(address.group(), view, chromium, act)
    finally:
        server.terminate()
        server.wait()


def opened_at(url: str, view: str, chromium: str, act: Callable[[Any], None] | None = None) -> float:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        start = time.perf_counter()
        page.goto(f"{url}#{view}")
        page.wait_for_selector(f"#view[data-view={view}]:not(.loading)")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        seconds = time.perf_counter() - start
        if act:
            start = time.perf_counter()
            act(page)
            seconds = time.perf_counter() - start
        browser.close()
    return seconds


def scroll(page: Any) -> None:
    """Scrolls the table of samples to its end, a page at a time, each painted."""
    page.evaluate(
        """async () => {
          const body = document.querySelector(".table .body");
          while (body.scrollTop + body.clientHeight < body.scrollHeight - 1) {
            body.scrollTop += body.clientHeight;
            await new Promise((done) => requestAnimationFrame(done));
          }
        }"""
    )


def recording(folder: Path) -> dict[str, Any]:
    """Runs two workers that measure their own recorder."""
    (folder / "bench.yaml").write_text(CONFIG)
    (folder / "reward.py").write_text("def score(solution_str, ground_truth):\n    return float('a' in solution_str)\n")
    rows = [{"prompt": f"question {i} " + "x" * (i % 24), "answer": "a"} for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder / "bench.yaml")],
            cwd=folder,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), outputs
    spent = [json.loads(text.splitlines()[-1]) for text in outputs]
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(m["timing_max_s/step"] for m in steps)
    size = sum(f.stat().st_size for name in ("spans", "samples") for f in (folder / "run" / name).iterdir())
    return {
        "step_s": seconds / len(steps),
        "recording_overhead_frac": max(spent) / seconds,
        "recorded_kib_per_step": size / 1024 / len(steps),
    }


def worker(config: str) -> None:
    """One worker whose recorder is timed: what it does itself, not what it records."""
    from distflow import cli
    from distflow.observe.recorder import Recorder
    from distflow.observe.samples import SampleRecorder
    from distflow.observe.spans import SpanRecorder

    spent, depth = 0.0, 0

    def timed(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent, depth
            start, depth = time.perf_counter(), depth + 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1
                spent += 0.0 if depth else time.perf_counter() - start

        setattr(cls, name, measured)

    for name in ("node", "outputs", "end_step", "waited"):
        timed(Recorder, name)
    for cls, name in (
        (SpanRecorder, "_add"),
        (SpanRecorder, "flush"),
        (SampleRecorder, "add"),
        (SampleRecorder, "flush"),
    ):
        timed(cls, name)
    try:
        cli.main(["run", config, "workers=2"])
    except SystemExit as e:
        print(json.dumps(spent))
        sys.exit(e.code)


if __name__ == "__main__":
    worker(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main()
