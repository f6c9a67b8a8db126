"""Models behind an endpoint that speaks OpenAI's API: many questions at once, each asked again while that may help."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from distflow.errors import DataError, cut, shown

_RETRIES, _RETRY_S = 3, 1.0
_REPLY = 1 << 28  # bytes of an answer, at most

T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint:
    """The model `name` of a server; the key is in the environment variable `api_key_env`."""

    base_url: str
    name: str
    api_key_env: str
    concurrent: int  # requests at the same time
    time_limit_s: float

    def ask(self, path: str, bodies: Sequence[Mapping[str, Any]], read: Callable[[Any], T]) -> list[T | Exception]:
        """Returns what `read` finds in the answer to each request, or why there is none."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        with ThreadPoolExecutor(self.concurrent, "endpoint") as pool:
            return list(pool.map(lambda body: self._answer(url, body, read), bodies))

    def _answer(self, url: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T | Exception:
        """Asks, and retries while the server is overloaded or cannot be reached."""
        error: Exception = DataError("never asked")
        for attempt in range(_RETRIES):
            try:
                return read(self._post(url, body))
            except urllib.error.HTTPError as e:
                error = DataError(f"{url} answered {e.code}: {cut(e.read(300).decode(errors='replace'), 200)}")
                if e.code != 429 and e.code < 500:
                    break
            except OSError as e:
                error = DataError(f"{url} cannot be reached: {e}")
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
                error = DataError(f"{url} gave an answer that is not one of this API: {shown(e)}")
                break
            time.sleep(_RETRY_S * attempt)
        return error

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        key = os.environ.get(self.api_key_env, "")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(url, json.dumps({"model": self.name, **body}).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.time_limit_s) as answer:
            return json.loads(answer.read(_REPLY))


@dataclass(frozen=True)
class ChatClient(Endpoint):
    """Asks in OpenAI's chat API."""

    max_tokens: int

    def answers(self, questions: Sequence[str]) -> list[str | Exception]:
        """Returns the answer to each question, or why there is none."""
        options = {"temperature": 0, "max_tokens": self.max_tokens}
        bodies = [{"messages": [{"role": "user", "content": question}], **options} for question in questions]
        return self.ask("chat/completions", bodies, lambda a: str(a["choices"][0]["message"]["content"] or ""))
