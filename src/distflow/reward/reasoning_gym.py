"""Tasks of reasoning-gym: `rows` generates the data, `call: distflow.reward.reasoning_gym:score` scores responses."""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from distflow.reward.errors import RewardError
from distflow.util.extras import how_to_install

try:
    _gym: Any = importlib.import_module("reasoning_gym")
except ImportError as e:
    raise RewardError(f"reasoning-gym is not installed ({e}); {how_to_install('gym')}") from e

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TUPLE, _PAIRS = "__tuple__", "__pairs__"  # JSON has neither, and some scorers compare by type


def rows(dataset: str, size: int, seed: int, **config: Any) -> Iterator[dict[str, Any]]:
    """Yields rows for a JSON Lines file; `config` are options of the dataset, such as `max_terms`."""
    for entry in create_dataset(dataset, {**config, "size": size, "seed": seed}):
        info = {key: _to_json(entry[key]) for key in ("question", "answer", "metadata")}
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": dataset,
            "extra_info": {**info, "config": config},
        }


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """Returns the score the dataset `data_source` gives the last `<answer>…</answer>`, or the whole response."""
    info = {key: _from_json(value) for key, value in (extra_info or {}).items()}
    entry = {"question": "", "answer": ground_truth, "metadata": {}, **info}
    return float(_scorer(data_source, json.dumps(entry.pop("config", {})))(last_answer(solution_str), entry))


def last_answer(response: str) -> str:
    """Returns the text of the last `<answer>…</answer>`, or the whole response if it has none."""
    tagged = _TAGGED.findall(response)
    return str(tagged[-1] if tagged else response).strip()


@cache
def _scorer(dataset: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    """Returns the dataset's own scorer; some depend on the options the tasks were generated with."""
    scorer: Callable[[str, Mapping[str, Any]], float] = create_dataset(dataset, json.loads(config)).score_answer
    return scorer


def create_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """Creates a dataset; an error names it and its options."""
    try:
        return _gym.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as e:
        raise RewardError(
            f"reasoning-gym cannot create dataset '{name}' with {dict(config)}: {e}; check its name and options"
        ) from e


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(v) for v in value]}
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {str(k): _to_json(v) for k, v in value.items()}
    if isinstance(value, dict):
        return {_PAIRS: [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    return str(value) if isinstance(value, str) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(_from_json(v) for v in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {_from_json(k): _from_json(v) for k, v in value[_PAIRS]}
    return {k: _from_json(v) for k, v in value.items()}
