"""The two ways a reward function may be written, verl's and TRL's: told apart by the names of the parameters."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distflow.errors import shown, suggest
from distflow.reward.errors import RewardError

VERL = "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) → number or dict (verl)"
TRL = "fn(prompts, completions, **columns) → list of numbers (TRL)"

Function = Callable[..., Any]

_GIVEN = {
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions", "completion_ids"),
}
_LARGEST = 3.4e38  # scores travel as float32


@dataclass(frozen=True)
class Signature:
    """What to call a function with: `takes` are its parameters, `needs` those that have no default and no `args`."""

    kind: Literal["verl", "trl"]
    takes: tuple[str, ...]
    needs: tuple[str, ...]
    open: bool  # takes any further name

    def wants(self, name: str) -> bool:
        return self.open or name in self.takes

    @property
    def columns(self) -> tuple[str, ...]:
        """Data columns it cannot do without."""
        return tuple(n for n in self.needs if n not in _GIVEN[self.kind])


@dataclass(frozen=True)
class Score:
    """None: the reward does not apply to this sample. `extra` are further numbers to be logged."""

    value: float | None
    extra: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """Why a sample has no score, as the rest of a sentence that begins with the function."""

    what: str


Result = Score | Failure


def recognise(fn: Any, where: str, args: Iterable[str] = ()) -> Signature:
    """How `fn` is to be called; `where` is said in errors, `args` are the names it is given besides."""
    if not callable(fn):
        raise RewardError(f"{where}: is a {type(fn).__name__}, not a function; name a function")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        raise RewardError(f"{where}: does not tell its parameters; wrap it in a Python function: {VERL}") from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = tuple(p.name for p in named)
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "solution_str" not in takes and "completions" not in takes:
        shown = ", ".join(str(p) for p in parameters)
        raise RewardError(f"{where}: its parameters ({shown}) are neither those of {VERL} nor of {TRL}; name them so")
    for arg in args:
        if arg not in takes and not is_open:
            raise RewardError(f"{where}: has no parameter '{arg}', which `args` gives{suggest(arg, takes)}")
    needs = tuple(p.name for p in named if p.default is p.empty and p.name not in args)
    signature = Signature("verl" if "solution_str" in takes else "trl", takes, needs, is_open)
    if signature.kind == "verl" and signature.columns:
        raise RewardError(f"{where}: needs '{signature.columns[0]}'; give it a default, or a value in `args`")
    return signature


def results_of(signature: Signature, value: Any, samples: int) -> list[Result]:
    """What a call for `samples` samples returned, sample by sample, checked."""
    if signature.kind == "verl":
        return [_verl_result(value)]
    if callable(getattr(value, "tolist", None)):  # an array or a tensor
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [Failure(f"returned {_shown(value)}; return a list with one number per sample")] * samples
    if len(value) != samples:
        wrong = f"returned {len(value)} scores for {samples} samples; return one per sample, in order"
        return [Failure(wrong)] * samples
    return [Score(None, {}) if v is None else _result(v) for v in value]


def _verl_result(value: Any) -> Result:
    if not isinstance(value, Mapping):
        return _result(value)
    if "score" not in value:
        return Failure(f"returned a dict without 'score'{suggest('score', map(str, value))}")
    # Text and the like is there for people to read, not to be averaged.
    extra = {str(k): _number(v) for k, v in value.items() if k != "score"}
    return _result(value["score"], {k: v for k, v in extra.items() if v is not None and _fits(v)})


def _result(value: Any, extra: Mapping[str, float] | None = None) -> Result:
    number = _number(value)
    if number is None:
        return Failure(f"returned {_shown(value)} as a score; return a number")
    if not _fits(number):
        return Failure(f"returned {number:g}; a score is a finite number")
    return Score(number, extra or {})


def _number(value: Any) -> float | None:
    """As a float; None if it is none."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):  # of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _fits(number: float) -> bool:
    return abs(number) <= _LARGEST  # false for nan


def _shown(value: Any) -> str:
    return f"{shown(value, 61)} ({type(value).__name__})"
