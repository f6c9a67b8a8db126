"""The walk of one step through the package: what a reader meets who follows it from call to call.

    python bench/walk.py [--rooms]

One worker trains a tiny model with GRPO in this process, on responses and then on conversations, and `sys.setprofile`
sees every call in the worker's thread. A step is what happens from one call of `group_advantage` to the next. Counted
are the files and functions of DistFlow that are called (comprehensions and lambdas belong to the function around them),
their packages (the first folder) and switches: how often a call is in another package than the call before it.
Recording and liveness are left out. The switches of conversations vary by some hundred between runs, with the order of
their turns. `--rooms` also prints, for each package, its lines, and its files and functions in both walks.

Any tree is measured whose package can be imported: `PYTHONPATH=OTHER/src python bench/walk.py`. A tree with finer
packages has more switches for the same calls; `switches_between_areas` counts with the packages of 0.1.0, to compare.
The last line is one JSON object.
"""

import argparse
import io
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import distflow
from distflow import cli

SOURCE = Path(distflow.__file__).parent
STEPS = 4  # the walk is that of the last whole step: what happens once has happened
CONFIG = {
    "flow": "grpo",
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "data": {"files": "rows.jsonl", "batch": 2},
    "rollout": {"n": 2, "max_tokens": 24},
    "steps": STEPS,
}
WALKS = {"response": {"reward": "user.py:compute_score"}, "conversation": {"environment": "user.py:Talk"}}
USER = """
def compute_score(solution_str):
    return float(len(solution_str) % 3)


class Talk:
    def __init__(self, env_config=None, extras=None):
        self.turns = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        said = [{"role": "user", "content": " more: "}]
        return {"observations": said, "reward": float(len(action) % 3), "done": self.turns == 2, "metadata": {}}
"""
LEFT_OUT = {"observe", "liveness", "page"}
# The package of 0.1.0 in which a room of today was.
AREAS = {
    **dict.fromkeys(("batch", "comm", "coordinator", "dataset"), "data"),
    **dict.fromkeys(("cpu", "model", "roles", "rollout", "train", "weights"), "engine"),
    **dict.fromkeys(("checkpoint", "cluster", "launch"), "run"),
    **dict.fromkeys(("agents", "userproc"), "environments"),
    "sandbox": "reward",
}

Call = tuple[str, str, int]  # file, qualified name, first line


def walk(name: str, folder: Path) -> list[Call]:
    """Trains in `folder` and returns the calls of the last whole step, in order."""
    folder.mkdir()
    rows = ({"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(16))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "user.py").write_text(USER)
    (folder / "walk.yaml").write_text(json.dumps({**CONFIG, **WALKS[name], "run_dir": str(folder / "run")}))
    calls: list[CodeType] = []
    source = f"{SOURCE}{os.sep}"

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(source):
            calls.append(frame.f_code)

    said = io.StringIO()
    sys.setprofile(see)
    try:
        with redirect_stdout(said):
            cli.main(["run", str(folder / "walk.yaml"), "workers=1"])
    except SystemExit as e:
        if e.code:
            raise
    finally:
        sys.setprofile(None)
    starts = [i for i, code in enumerate(calls) if code.co_name == "group_advantage"]
    if len(starts) < STEPS:
        sys.exit(f"walk.py: {len(starts)} calls of group_advantage in {STEPS} steps\n{said.getvalue()}")
    step = [(c.co_filename[len(source) :], c.co_qualname, c.co_firstlineno) for c in calls[starts[-2] : starts[-1]]]
    return [c for c in step if room(c[0]) not in LEFT_OUT]


def room(file: str) -> str:
    return file.partition(os.sep)[0].removesuffix(".py")


def functions(calls: Sequence[Call]) -> set[Call]:
    return {c for c in calls if not c[1].endswith(">")}


def switches(packages: Sequence[str]) -> int:
    return sum(a != b for a, b in pairwise(packages))


def counted(calls: Sequence[Call]) -> dict[str, int]:
    rooms = [room(file) for file, *_ in calls]
    return {
        "files": len({file for file, *_ in calls}),
        "functions": len(functions(calls)),
        "packages": len(set(rooms)),
        "switches": switches(rooms),
        "switches_between_areas": switches([AREAS.get(r, r) for r in rooms]),
        "calls": len(calls),
    }


def lines_of_rooms() -> dict[str, int]:
    """Returns the lines of Python of each package, and of each file beside them."""
    lines: dict[str, int] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = room(str(path.relative_to(SOURCE)))
        lines[name] = lines.get(name, 0) + len(path.read_text().splitlines())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="lines, files and functions of each package")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    one_worker = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(one_worker, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        walks = {name: walk(name, Path(folder) / name) for name in WALKS}
    lines = lines_of_rooms()
    if args.rooms:
        for name, count in lines.items():
            met = [[c for c in calls if room(c[0]) == name] for calls in walks.values()]
            parts = (f"{len({c[0] for c in m}):3} files {len(functions(m)):4} functions" for m in met)
            print(f"{name:12} {count:6} lines  {'  '.join(parts)}")
    print(json.dumps({"source_lines": sum(lines.values()), **{n: counted(calls) for n, calls in walks.items()}}))


if __name__ == "__main__":
    main()
