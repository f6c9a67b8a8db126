"""The standing red team: programs that cheat, each in every form of tests, and right programs, which must all pass.

    python bench/hacks.py [NAME ...]

Cheats that are `aimed` have tests of their own, some of which need numpy. A cheat is rewarded if any of its scores is
above 0. `suspicious` counts the cheats that are marked at least once, and `right_programs_suspicious` the right
programs that are. The last line is one JSON object; the exit code is 1 if a cheat was rewarded or a right program was
not.
"""

import json
import sys
import time
from pathlib import Path

LIMIT_S, HANG_S = 1.0, 0.1  # for a test of a cheat, and of one that hangs anyway


def main(wanted: list[str]) -> int:
    sys.path[0] = str(Path(__file__).parents[1] / "tests")
    from redteam import AIMED, AIMED_NUMPY, CHEATS, FORMS, HANGING, RIGHT, RIGHT_NUMPY
    from redteam.run import Outcome, attempt

    start = time.perf_counter()
    rewarded, marked = [], set()
    for name, program in CHEATS.items():
        if wanted and name not in wanted:
            continue
        began = time.perf_counter()
        for form, (truth, info) in FORMS.items():
            outcome = attempt(program, truth, info, HANG_S if name in HANGING else LIMIT_S)
            if outcome.score > 0:
                rewarded.append(name)
                print(f"REWARDED {outcome.score:g}: {name} / {form}", flush=True)
            if outcome.suspicious:
                marked.add(name)
        print(f"{time.perf_counter() - began:5.1f} s  {name}", flush=True)
    for name, (program, truth) in (AIMED | AIMED_NUMPY).items():
        if not wanted or name in wanted or "aimed" in wanted:
            outcome = attempt(program, truth, {}, 2 * LIMIT_S, packages=name in AIMED_NUMPY)
            if outcome.score > 0:
                rewarded.append(name)
                print(f"REWARDED {outcome.score:g}: {name}", flush=True)
            if outcome.suspicious:
                marked.add(name)
    failed: list[tuple[str, Outcome]] = []
    suspicious = 0
    rights = [*RIGHT, *RIGHT_NUMPY]
    for right in rights:
        outcome = attempt(right.program, right.truth, right.info, packages=right in RIGHT_NUMPY)
        suspicious += bool(outcome.suspicious)
        if outcome.score < 1:
            failed.append((right.name, outcome))
            print(f"NOT REWARDED {outcome}: {right.name}", flush=True)
    report = {
        "programs": len(wanted or CHEATS),
        "forms": len(FORMS),
        "aimed": len(AIMED | AIMED_NUMPY),
        "rewarded": len(rewarded),
        "right_programs": len(rights),
        "right_programs_rewarded": len(rights) - len(failed),
        "suspicious": len(marked),
        "right_programs_suspicious": suspicious,
        "s": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(report))
    return bool(rewarded or failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
