"""Hides secrets in the files that describe a run. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<redacted>"
# The key of a secret: api_key, HF_TOKEN, password, …; not `max_tokens`, nor the name of a special token.
_KEY = re.compile(
    r"(?i)(?:^|[_.-])(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!end_)"
    r"(?:token|secret|password|passwd|passphrase|credentials?|authorization|(?:api|access|private|secret)_?key)$"
)
# A secret by its form: keys of Hugging Face, OpenAI and the like, GitHub, AWS; and the password of a URL.
_VALUE = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA[A-Z0-9]{12,})|(?<=://)[^/\s@]+(?=@)")


def redact(value: Any, key: str = "") -> Any:
    """Returns a copy of plain JSON values in which secrets are hidden; numbers are never taken for one."""
    if isinstance(value, Mapping):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v, key) for v in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _KEY.search(key) else _VALUE.sub(HIDDEN, value)


def redact_word(word: str) -> str:
    """Returns a word of a command line; in `key=value`, the value of a secret key is hidden."""
    key, equals, value = word.partition("=")
    return f"{key}={redact(value, key)}" if equals else str(redact(word))
