"""A run beside another user of the machine who attacks all that it listens to, against the same run left alone.

    python bench/hostile.py [--connections 200] [--steps 40] [--workers 2]

The other user (nobody, if this is root) opens so many connections of each kind to every socket of every worker and to
the page of the run, holds them, and opens those anew that are closed: silent ones, parts of greetings, parts of
requests, deeply nested JSON, descriptors sent along; and sends packets of each kind by UDP. The run must end as the
other one, to the bit, without a restart, and the page must be shown to its user and to nobody else. The last line is
one JSON object.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from strangers import Strangers, listening_sockets

AGENT = """
import json
import urllib.request


def ask(base_url, api_key, row):
    body = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 12}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = json.loads(reply.read())["choices"][0]["message"]["content"]
    return sum(c.isdigit() for c in text or "") / 10
"""
CURVES = ("actor/loss", "actor/grad_norm", "reward/mean", "response_length/mean")


def prepare(folder: Path, steps: int, workers: int) -> Path:
    rows = [{"prompt": f"say {i}"} for i in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)
    config: dict[str, Any] = {
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "data.jsonl", "batch": 8},
        "environment": {"call": "agent.py:ask"},
        "rollout": {"n": 4, "max_tokens": 80},
        "train": {"lr": 1e-3},
        "steps": steps,
        "workers": workers,
        "restarts": 0,
        "wait_limit_s": 60,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distflow", "run", str(config), f"run_dir={run}"]
    with open(run.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def curve(run: Path) -> list[list[Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row["step"], *(row.get(name) for name in CURVES)] for row in rows]


def attack(targets: dict[str, list[str]], connections: int) -> None:
    """Attacks until it is killed; prints how many connections it has opened in all, by kind."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    "localhost".encode("idna")  # loads what nobody may not be able to read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    strangers = Strangers(targets)
    for _ in range(connections):
        strangers.connect()
    print(json.dumps(strangers.counts), flush=True)
    while True:
        time.sleep(0.5)
        strangers.connect_again()


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as e:
        return e.code


def steps_of(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        attack(json.loads(args.attack), args.connections)
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    config = prepare(folder, args.steps, args.workers)
    calm, run = folder / "calm", folder / "attacked"
    assert start(config, calm).wait() == 0, calm.with_suffix(".log").read_text()

    process = start(config, run)
    while steps_of(run) < 1:
        assert process.poll() is None, run.with_suffix(".log").read_text()
        time.sleep(0.02)
    page = subprocess.Popen(
        [sys.executable, "-m", "distflow", "show", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert page.stdout is not None
    address = re.search(r"http://\S+", page.stdout.readline())
    assert address is not None
    pids = [json.loads((run / "workers" / f"{r}.heartbeat").read_text())["pid"] for r in range(args.workers)]
    targets = listening_sockets([*pids, page.pid])
    print(f"after step {steps_of(run)}: {targets}", flush=True)
    command = [sys.executable, __file__, "--connections", str(args.connections)]
    attacker = subprocess.Popen([*command, "--attack", json.dumps(targets)], stdout=subprocess.PIPE, text=True)
    assert attacker.stdout is not None
    opened, at = json.loads(attacker.stdout.readline()), steps_of(run)
    mine, theirs = status(address.group()), status(address.group().rsplit("/", 2)[0] + "/")
    code = process.wait()
    for other in (attacker, page):
        other.kill()
    log = run.with_suffix(".log").read_text()
    print(log)
    result = {
        "exit_code": code,
        "identical": code == 0 and curve(run) == curve(calm),
        "page": mine,
        "page_without_token": theirs,
        "steps_under_attack": args.steps - at,
        "opened": opened,
    }
    print(json.dumps(result))
    sys.exit(0 if result["identical"] and (mine, theirs) == (200, 403) else 1)


if __name__ == "__main__":
    main()
