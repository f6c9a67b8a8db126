"""Gives a program its reward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.reward.code import unit_tests


@dataclass(frozen=True)
class Outcome:
    score: float
    suspicious: str = ""


def attempt(program: str, truth: Any, info: Mapping[str, Any], seconds: float = 5.0, packages: bool = False) -> Outcome:
    result = unit_tests(
        "",
        program,
        truth,
        info,
        time_limit_s=seconds,
        total_s=2 * seconds,
        memory_mb=256 << packages,
        packages=packages,
    )
    return Outcome(float(result["score"]), str(result["suspicious"]))
