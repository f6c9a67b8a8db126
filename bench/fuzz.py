"""Junk of every kind that comes from outside: configs, graphs, rows, checkpoints, rewards, what nodes return, words.

    python bench/fuzz.py [KIND ...]

A case fails if anything but one of our errors comes of it, if that does not name the input, or if it takes too long or
too much memory. The last line is one JSON object.
"""

import json
import resource
import sys
import tempfile
import warnings
from pathlib import Path


def main(wanted: list[str]) -> int:
    sys.path[0] = str(Path(__file__).parents[1] / "tests")  # and not this folder, in which `fuzz` is this file
    from fuzz.harness import fuzz
    from fuzz.kinds import KINDS

    warnings.simplefilter("ignore")
    found = {}
    for kind in KINDS:
        if wanted and kind.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = kind(Path(folder))
            try:
                report = fuzz(made, kind.full)
            finally:
                made.close()
        print(f"{kind.name}: {report.summary}", *report.slow, *report.failures, sep="\n  ", flush=True)
        found[kind.name] = report
    failures = sum(len(r.failures) for r in found.values())
    kinds = {name: {"cases": r.cases, "refused": r.refused, "s": round(r.seconds, 1)} for name, r in found.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    cases = sum(r.cases for r in found.values())
    print(json.dumps({"cases": cases, "failures": failures, "kinds": kinds, "peak_mib": peak}))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
