"""The two signatures of a reward function, verl's and TRL's, told apart by parameter names; checks what it returns."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distflow.errors import shown, suggest
from distflow.reward.errors import RewardError

VERL = "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) → number or dict (verl)"
TRL = "fn(prompts, completions, **columns) → list of numbers, or None where it does not apply (TRL)"

Function = Callable[..., Any]

_STANDARD_PARAMETERS = {
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"),
}
SUSPICIOUS = "suspicious"  # the column in which a function says why a response looks like cheating
_LARGEST_SCORE = 3.4e38  # scores travel as float32


@dataclass(frozen=True)
class Signature:
    """The way to call a function; `required` are the parameters without a default and without a value in `args`."""

    kind: Literal["verl", "trl"]
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    var_keyword: bool  # it has `**kwargs`

    def accepts(self, name: str) -> bool:
        return self.var_keyword or name in self.parameters

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Returns the data columns that the function requires."""
        return tuple(n for n in self.required if n not in _STANDARD_PARAMETERS[self.kind])


@dataclass(frozen=True)
class Score:
    """The score of a sample, None if the reward does not apply to it; `extra` holds further numbers to log, and
    `columns` what else the function has to say about the sample."""

    value: float | None
    extra: Mapping[str, float]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoScore:
    """The reason why a sample has no score; `reason` completes a sentence whose subject is the function."""

    reason: str


Result = Score | NoScore


def parse_signature(fn: Any, where: str, args: Iterable[str] = ()) -> Signature:
    """Returns how to call `fn`; `where` starts error messages, `args` are the names the config gives values for."""
    if not callable(fn):
        raise RewardError(f"{where}: is a {type(fn).__name__}, not a function; name a function")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        raise RewardError(
            f"{where}: its parameters cannot be inspected; wrap it in a Python function: {VERL}"
        ) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in named)
    var_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "solution_str" not in names and "completions" not in names:
        listed = ", ".join(str(p) for p in parameters)
        raise RewardError(
            f"{where}: its parameters ({listed}) match neither {VERL} nor {TRL}; rename them to match one of the two"
        )
    for arg in args:
        if arg not in names and not var_keyword:
            raise RewardError(f"{where}: has no parameter '{arg}', which is set in `args`{suggest(arg, names)}")
    required = tuple(p.name for p in named if p.default is p.empty and p.name not in args)
    signature = Signature("verl" if "solution_str" in names else "trl", names, required, var_keyword)
    if signature.kind == "verl" and signature.required_columns:
        missing = signature.required_columns[0]
        raise RewardError(f"{where}: parameter '{missing}' has no value; give it a default, or set it in `args`")
    return signature


def parse_results(signature: Signature, value: Any, samples: int) -> list[Result]:
    """Checks what a call for `samples` samples returned; returns one result per sample."""
    if signature.kind == "verl":
        return [_parse_verl(value)]
    if callable(getattr(value, "tolist", None)):  # an array or a tensor
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [NoScore(f"returned {_describe(value)}; return a list with one number per sample")] * samples
    if len(value) != samples:
        reason = f"returned {len(value)} scores for {samples} samples; return one per sample, in order"
        return [NoScore(reason)] * samples
    return [Score(None, {}) if v is None else _parse_score(v) for v in value]


def _parse_verl(value: Any) -> Result:
    if not isinstance(value, Mapping):
        return _parse_score(value)
    if "score" not in value:
        return NoScore(f"returned a dict without 'score'{suggest('score', map(str, value))}")
    # Only numbers can be averaged; verl's functions also return text such as the extracted prediction.
    extra = {str(k): to_float(v) for k, v in value.items() if k not in ("score", SUSPICIOUS)}
    numbers = {k: v for k, v in extra.items() if v is not None and _is_finite(v)}
    columns = {SUSPICIOUS: str(value[SUSPICIOUS] or "")} if SUSPICIOUS in value else {}
    return _parse_score(value["score"], numbers, columns)


def _parse_score(
    value: Any, extra: Mapping[str, float] | None = None, columns: Mapping[str, Any] | None = None
) -> Result:
    number = to_float(value)
    if number is None:
        return NoScore(f"returned {_describe(value)} as a score; return a number")
    if not _is_finite(number):
        return NoScore(f"returned {number:g}; return a finite score that fits in float32")
    return Score(number, extra or {}, columns or {})


def to_float(value: Any) -> float | None:
    """Converts any kind of number to a float; returns None for anything else."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_finite(number: float) -> bool:
    return abs(number) <= _LARGEST_SCORE  # false for nan


def _describe(value: Any) -> str:
    return f"{shown(value, 61)} ({type(value).__name__})"
