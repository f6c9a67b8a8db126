"""Step time against the fraction of a batch that may be begun with older weights, and why the curve flattens.

Published for verl's asynchronous trainer at staleness 0, 0.1, 0.3 and 0.5: 231, 171, 146 and 151 s a step, of which the
trainer waits 128, 58, 39 and 33 s for samples. `queue` computes the same rule: after each update, samples that were
begun go on, at most (1 + s) × batch are begun, and the next update starts when any batch of them is complete. Two
numbers are fitted, the mean length to the 128 s and the slots to the rest; updates take 100 s, the weight sync 4 s.

`ours` runs real workers with sleeping stages of that ratio, 1 / 100 as long: staleness 0, then staleness 1 with partial
rollouts, where a step takes the prompts of its own batch, never any that are complete.
"""

import heapq
import json
import tempfile
from pathlib import Path

import numpy as np

from overlap import BATCH, run, step_s

FRACTIONS = (0.0, 0.1, 0.3, 0.5)
PUBLISHED_S, PUBLISHED_WAIT_S = (231, 171, 146, 151), (128, 58, 39, 33)
SAMPLES, SLOTS, SIGMA, UPDATE_S, HAND_OVER_S = 512, 128, 0.7, 100.0, 4.0
STAGES = {"token_s": 0.155, "slots": 16, "update_s": 1.0, "sigma": 1.0, "score_s": 0.0}


def queue(fraction: float, mean_s: float, steps: int = 60, skipped: int = 10) -> tuple[float, float]:
    """Returns the mean time of a step, and how long of it the trainer waits for samples."""
    rng, times, waits = np.random.default_rng(0), list[float](), list[float]()
    begun, complete, now = list[float](), 0, 0.0  # seconds left of each, samples that no update has seen

    for _ in range(steps):
        start, left = now, round((1 + fraction) * SAMPLES) - complete - len(begun)
        running = [now + seconds for seconds in begun]
        heapq.heapify(running)

        def begin(at: float, running: list[float] = running) -> None:
            heapq.heappush(running, at + mean_s * float(np.exp(SIGMA * rng.standard_normal() - SIGMA**2 / 2)))

        while len(running) < SLOTS and left:
            begin(now)
            left -= 1
        end = None  # of the update
        while running and (end is None or running[0] <= end):
            if complete >= SAMPLES and end is None:
                complete, end = complete - SAMPLES, now + UPDATE_S
                waits.append(now - start)
                continue
            now = heapq.heappop(running)
            complete += 1
            if left:
                begin(now)
                left -= 1
        if end is None:
            complete, end = complete - SAMPLES, now + UPDATE_S
            waits.append(now - start)
        begun, now = [t - end for t in running], end + HAND_OVER_S
        times.append(now - start)
    return float(np.mean(times[skipped:])), float(np.mean(waits[skipped:]))


def main() -> None:
    mean_s = 10.0
    for _ in range(4):
        mean_s *= PUBLISHED_WAIT_S[0] / queue(0.0, mean_s)[1]
    modelled = [queue(s, mean_s) for s in FRACTIONS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(64)))
        ours = [step_s(run(folder, "lock-step", STAGES))]
        for s in FRACTIONS[1:]:
            stages = run(folder, f"s{s}", STAGES, staleness=1, partial=round(s * BATCH))
            ours.append(step_s(stages))
    print("staleness   published s (wait)   queue s (wait)   ours, 1/100 s")
    for s, p, w, (t, wait), own in zip(FRACTIONS, PUBLISHED_S, PUBLISHED_WAIT_S, modelled, ours, strict=True):
        print(f"{s:9}   {p:10} ({w:4})   {t:11.0f} ({wait:4.0f})   {own:13.3f}")
    result = {
        "fractions": FRACTIONS,
        "published_s": PUBLISHED_S,
        "queue_s": [round(t) for t, _ in modelled],
        "queue_wait_s": [round(w) for _, w in modelled],
        "ours_s": [round(t, 3) for t in ours],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
