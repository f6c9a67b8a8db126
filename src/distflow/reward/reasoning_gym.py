"""Tasks of reasoning-gym: `rows` makes the data, `call: distflow.reward.reasoning_gym:score` judges the answers."""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from distflow.reward.errors import RewardError

try:
    _gym: Any = importlib.import_module("reasoning_gym")
except ImportError as e:
    raise RewardError(f"reasoning-gym is not installed ({e}); pip install 'distflow-rl[gym]'") from e

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE, _PAIRS = "__tuple__", "__pairs__"  # what JSON would turn into something else, and some judges compare by type


def rows(dataset: str, size: int, seed: int, **config: Any) -> Iterator[dict[str, Any]]:
    """Rows for a JSON Lines file; `config` are options of the dataset, such as `max_terms`."""
    made = _dataset(dataset, {**config, "size": size, "seed": seed})
    for entry in made:
        told = {key: _packed(entry[key]) for key in ("question", "answer", "metadata")}
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": dataset,
            "extra_info": {**told, "config": config},
        }


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """What the dataset `data_source` says of the last `<answer>…</answer>` in the response, or of all of it."""
    info = {key: _unpacked(value) for key, value in (extra_info or {}).items()}
    entry = {"question": "", "answer": ground_truth, "metadata": {}, **info}
    tagged = _TAGGED.findall(solution_str)
    answer = (tagged[-1] if tagged else solution_str).strip()
    return float(_judge(data_source, json.dumps(entry.pop("config", {})))(answer, entry))


@cache
def _judge(dataset: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    """Some judges depend on how the tasks were made."""
    judge: Callable[[str, Mapping[str, Any]], float] = _dataset(dataset, json.loads(config)).score_answer
    return judge


def _dataset(name: str, config: Mapping[str, Any]) -> Any:
    try:
        return _gym.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as e:
        raise RewardError(f"reasoning-gym makes no dataset '{name}' with {dict(config)}: {e}") from e


def _packed(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(v) for v in value]}
    if isinstance(value, list):
        return [_packed(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {str(k): _packed(v) for k, v in value.items()}
    if isinstance(value, dict):
        return {_PAIRS: [[_packed(k), _packed(v)] for k, v in value.items()]}
    return str(value) if isinstance(value, str) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_unpacked(v) for v in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {_unpacked(k): _unpacked(v) for k, v in value[_PAIRS]}
    return {k: _unpacked(v) for k, v in value.items()}
