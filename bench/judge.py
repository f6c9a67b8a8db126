"""How many reference solutions of public problem sets the judge of programs accepts, per set.

    python bench/judge.py human_eval=HumanEval.jsonl.gz mbpp=mbpp.jsonl leetcode=LeetCodeDataset.jsonl.gz \
        class_eval=ClassEval_data.json [--packages] [--limit N]

The files are those of the authors' repositories; none is part of this one. For each set the last line, one JSON object,
has the number of rows, of reference solutions that pass all tests, of rows that are refused with a reason, and the
share that passes of the rows that are not refused.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distflow.reward.code import unit_tests

Row = tuple[str, str, Any, dict[str, Any]]  # its name, a reference solution, the ground truth, the extra info


def human_eval(row: dict[str, Any]) -> Row:
    return row["task_id"], row["canonical_solution"], row, {}


def mbpp(row: dict[str, Any]) -> Row:
    return f"MBPP/{row['task_id']}", row["code"], row, {}


def leetcode(row: dict[str, Any]) -> Row:
    return row["task_id"], row["completion"], row, {}


def class_eval(row: dict[str, Any]) -> Row:
    imports = "\n".join(row["import_statement"])  # the authors join them, the solution and the tests in one file
    program = f"{imports}\n{row['solution_code']}"
    return row["task_id"], program, row["test"], {"entry_point": [row["class_name"]], "setup": imports}


READERS: dict[str, Callable[[dict[str, Any]], Row]] = {f.__name__: f for f in (human_eval, mbpp, leetcode, class_eval)}


def rows(path: Path) -> Iterator[dict[str, Any]]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if ".jsonl" in path.name:
        yield from map(json.loads, data.splitlines())
    else:
        yield from json.loads(data)


def judge(name: str, path: Path, packages: bool, limit: int) -> dict[str, float]:
    start = time.perf_counter()
    passed = refused = total = 0
    for row in list(rows(path))[:limit]:
        task, program, truth, info = READERS[name](row)
        total += 1
        try:
            result = unit_tests("", program, truth, info, time_limit_s=20.0, total_s=60.0, packages=packages)
        except ValueError as e:
            refused += 1
            print(f"refused  {task}: {str(e)[:200]}", flush=True)
            continue
        passed += result["all_passed"] == 1.0
        if result["all_passed"] != 1.0:
            print(f"FAILED   {task}: {result}", flush=True)
    share = round(passed / max(1, total - refused), 4)
    seconds = round(time.perf_counter() - start, 1)
    return {"rows": total, "passed": passed, "refused": refused, "share": share, "s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="+", metavar="SET=FILE", help=", ".join(READERS))
    parser.add_argument("--packages", action="store_true")
    parser.add_argument("--limit", type=int, default=sys.maxsize)
    args = parser.parse_args()
    sets = dict(s.split("=", 1) for s in args.sets)
    print(json.dumps({n: judge(n, Path(p), args.packages, args.limit) for n, p in sets.items()}))


if __name__ == "__main__":
    main()
