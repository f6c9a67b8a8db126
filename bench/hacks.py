"""The standing red team: programs that cheat, each in every form of tests, and right programs, which must all pass.

    python bench/hacks.py [NAME ...]

A cheat is rewarded if any of its scores is above 0. `suspicious` counts the cheats that are marked at least once, and
`right_programs_suspicious` the right programs that are. The last line is one JSON object; the exit code is 1 if a cheat
was rewarded or a right program was not.
"""

import json
import sys
import time
from pathlib import Path

LIMIT_S, HANG_S = 1.0, 0.1  # for a test of a cheat, and of one that hangs anyway


def main(wanted: list[str]) -> int:
    sys.path[0] = str(Path(__file__).parents[1] / "tests")
    from redteam import CHEATS, FORMS, HANGING, RIGHT
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
    failed: list[tuple[str, Outcome]] = []
    suspicious = 0
    for right in RIGHT:
        outcome = attempt(right.program, right.truth, right.info)
        suspicious += bool(outcome.suspicious)
        if outcome.score < 1:
            failed.append((right.name, outcome))
            print(f"NOT REWARDED {outcome}: {right.name}", flush=True)
    report = {
        "programs": len(wanted or CHEATS),
        "forms": len(FORMS),
        "rewarded": len(rewarded),
        "right_programs": len(RIGHT),
        "right_programs_rewarded": len(RIGHT) - len(failed),
        "suspicious": len(marked),
        "right_programs_suspicious": suspicious,
        "s": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(report))
    return bool(rewarded or failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
