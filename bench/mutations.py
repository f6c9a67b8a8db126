"""Plants realistic bugs, one at a time, in a copy of the tree, and runs the tests that should notice.

    python bench/mutations.py [--only WORD ...] [--minutes M] [--results FILE] [--list | --check]

A bug is killed if a test fails, or does not end, that passes without it; it survives if all of its tests pass, and is
not counted if the test fails without it too. The tests of a bug are named beside it, the likeliest first, and run until
one fails, in forks of this process, which has imported what the package imports; bugs whose tests need no workers come
first. `--only` chooses by parts of the name of a bug or of its file.
Results are kept in a file, so that a run that was cut off, or ended after `--minutes`, is continued; a bug whose text
or tests have changed since is planted again. `--check` only finds bugs whose text is no longer in the code, which are
to be planted anew by hand; they count as neither killed nor survived.

The last line is one JSON object; the exit code is 1 if a bug survived or cannot be planted.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from planted_bugs import BUGS, SOURCE, Bug

ROOT = Path(__file__).parents[1]
TEST_LIMIT_S = 300.0  # for the tests of one bug on an idle machine; the most that a test may hang
GOAL = 0.95


class Tree:
    """A copy of the files of the repository in which bugs are planted; tests in it import its own package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for compiled in (ROOT / SOURCE).rglob("__pycache__/*.nb[ic]"):  # kernels, which take minutes
            (folder / compiled.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(compiled, folder / compiled.relative_to(ROOT))
        os.environ |= {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
        self._import_what_it_imports()

    def _import_what_it_imports(self) -> None:
        """Imports what the package and its tests import, but nothing of the package."""
        say = "print(distflow.__file__, os.environ.get('ONEDNN_MAX_CPU_ISA', ''), *sys.modules, sep='\\n')"
        program = (
            f"import os, sys, distflow.api, distflow.roles.policy, hypothesis, pytest_timeout, xdist.plugin; {say}"
        )
        found = subprocess.run(
            [sys.executable, "-c", program], cwd=self.folder, check=True, capture_output=True, text=True
        )
        where, isa, *names = found.stdout.splitlines()
        if not where.startswith(str(self.folder)):
            raise RuntimeError(f"tests in {self.folder} would import {where}")
        if isa:
            os.environ["ONEDNN_MAX_CPU_ISA"] = isa
        for name in names:
            if name.partition(".")[0] not in ("distflow", "__main__", "sitecustomize"):
                with suppress(ImportError):
                    importlib.import_module(name)

    def run(self, test: str) -> str | None:
        """Runs tests until one fails; returns which, or how it ended, None if all have passed."""
        output = self.folder.with_suffix(".out")
        pid = os.fork()
        if not pid:
            self._pytest(test, output)
        load = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        end = time.monotonic() + TEST_LIMIT_S * load
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return f"{test}: did not end"
            time.sleep(0.02)
        code, said = os.waitstatus_to_exitcode(ended[1]), output.read_text(errors="replace")
        if code == 0:
            return None
        if code in (1, 2) or code < 0:  # failed, could not even be imported, or crashed
            failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            return failed[0].split(" - ")[0].partition(" ")[2] if failed else f"{test}: ended with {code}"
        raise RuntimeError(f"{test}: pytest ended with {code}\n{said[-4000:]}")

    def _pytest(self, test: str, output: Path) -> None:
        """Runs pytest in this process, which it ends."""
        code = 3  # an error of pytest's
        try:
            os.setsid()
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.chdir(self.folder)
            sys.path[:1] = [str(self.folder / "src")]  # instead of this folder, whose files have names of tests
            del sys.modules["__main__"].__file__  # processes that tests start would import it, from its folder
            sys.argv = ["pytest"]
            code = int(pytest.main(["-n", "0", "-x", "-q", "-p", "no:cacheprovider", test]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutations.json")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    bugs = [b for b in BUGS if not options.only or any(w in b.name or w in b.file for w in options.only)]
    bugs.sort(key=lambda b: "distributed" in b.tests[0])
    stale = [b.name for b in bugs if (ROOT / SOURCE / b.file).read_text().count(b.text) != 1]
    if options.list or options.check:
        for b in bugs if options.list else [b for b in bugs if b.name in stale]:
            print(f"{b.file}: {b.name}")
        return int(bool(stale))
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    start, not_counted = time.monotonic(), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder))
        for b, entry in _plant(tree, [b for b in bugs if b.name not in stale], results):
            if entry["unsound"]:
                not_counted[b.name] = entry["unsound"]
                print(f"{b.file}: {b.name}: not counted, as {entry['unsound']} fails without any bug", flush=True)
                continue
            results[b.key] = entry
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(results, indent=1))
            said = f"killed by {entry['killed_by']}" if entry["killed_by"] else "SURVIVED"
            print(f"{entry['seconds']:6.1f} s  {b.file}: {b.name}: {said}", flush=True)
            if time.monotonic() - start > 60 * options.minutes:
                break
    known = {b.name: results[b.key] for b in bugs if b.key in results}
    survived = [name for name, entry in known.items() if not entry["killed_by"]]
    rate = 1 - len(survived) / len(known) if known else 0.0
    report = {
        "bugs": len(bugs),
        "planted": len(known),
        "killed": len(known) - len(survived),
        "kill_rate": round(rate, 4),
        "goal": GOAL,
        "survived": survived,
        "not_counted": not_counted,
        "cannot_be_planted": stale,
        "rooms": len({b.file.partition("/")[0] for b in bugs if b.name in known}),
        "seconds": round(sum(entry["seconds"] for entry in known.values())),
    }
    print(json.dumps(report))
    return int(bool(survived or stale or not_counted))


def _plant(tree: Tree, bugs: list[Bug], results: dict[str, Any]) -> Iterator[tuple[Bug, dict[str, Any]]]:
    """Plants each bug that has no result yet, and runs its tests."""
    sound: set[str] = set(results.setdefault("sound", []))  # tests that pass in the tree as it is
    for b in bugs:
        if b.key in results:
            continue
        start, killed_by, unsound = time.monotonic(), None, None
        for test in b.tests:
            with b.planted(tree.folder):
                killed_by = tree.run(test)
            if killed_by is None:
                continue
            if killed_by not in sound:
                unsound = tree.run(_whole(killed_by, test))
            if unsound is None:
                sound.add(killed_by)
                results["sound"] = sorted(sound)
            break
        seconds = round(time.monotonic() - start, 1)
        yield b, {"name": b.name, "killed_by": killed_by, "unsound": unsound, "seconds": seconds}


def _whole(killed_by: str, test: str) -> str:
    """Returns the test to run without the bug: the one that failed, or all if it is not known which."""
    return killed_by if killed_by.startswith("tests/") and ": " not in killed_by else test


if __name__ == "__main__":
    sys.exit(main())
