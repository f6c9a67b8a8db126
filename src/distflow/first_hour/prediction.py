"""Predicts the memory and the time of a run on the device: memory by the trainer itself on tensors without memory, time
by the simulator where it knows the hardware."""

from typing import Any

import torch

from distflow.device.footprint import CONTEXT
from distflow.device.offer import Offer
from distflow.errors import DistflowError
from distflow.rehearsal.check import walk
from distflow.run.program import Program
from distflow.simulate.binding import Assumptions
from distflow.simulate.hardware import FOLDER, load_hardware
from distflow.simulate.report import make_report

_PROMPT = 100.0  # tokens, about


def answer(config: str, kind: str, name: str, memory: int, bfloat16: bool) -> dict[str, Any]:
    """Returns the largest peak of a training phase and that of a rollout, without what is not torch's, and tokens per
    second; of a CPU the memory of the same on a device."""
    program = Program.load(config)
    workers = program.config.workers or 1
    offer = Offer(kind, name, memory, bfloat16) if memory else None
    # This process does not see the device that is meant.
    walked = walk(program, workers, offer, torch.device("meta" if memory else "cpu"))
    choices = {c.key: c.value for c in walked.choices}
    peaks = {name: size - CONTEXT for name, size in walked.peaks().items()}
    return {"memory": peaks, "chosen": choices, "tokens_per_s": _speed(Program(walked.config), workers, name)}


def _speed(program: Program, workers: int, device: str) -> float | None:
    """Returns tokens per second by the simulator; None: it does not know the device."""
    known = (file.stem for file in FOLDER.glob("*.yaml"))
    hardware = next((h for h in known if h in device.lower().split()), None)
    if hardware is None:
        return None
    longest = program.config.rollout.max_tokens
    try:
        report = make_report(program, workers, load_hardware(hardware), Assumptions(None, _PROMPT, longest, 0.0))
    except DistflowError:
        return None
    return report.plan.samples * longest / report.result.step_s
