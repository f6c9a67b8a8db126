"""A judge behind an endpoint that speaks OpenAI's chat API."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from distflow.errors import DataError, cut, shown

_RETRIES, _RETRY_S = 3, 1.0
_REPLY = 1 << 20  # bytes of an answer, at most


@dataclass(frozen=True)
class ChatClient:
    """Asks the model `name` of a server; the key is in the environment variable `api_key_env`."""

    base_url: str
    name: str
    api_key_env: str
    max_tokens: int
    concurrent: int
    time_limit_s: float

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def answers(self, questions: Sequence[str]) -> list[str | Exception]:
        """Returns the answer to each question, or why there is none."""
        with ThreadPoolExecutor(self.concurrent, "judge") as pool:
            return list(pool.map(self._answer, questions))

    def _answer(self, question: str) -> str | Exception:
        """Asks, and retries while the server is overloaded or cannot be reached."""
        error: Exception = DataError("never asked")
        for attempt in range(_RETRIES):
            try:
                return self._ask(question)
            except urllib.error.HTTPError as e:
                error = DataError(f"{self.url} answered {e.code}: {cut(e.read(300).decode(errors='replace'), 200)}")
                if e.code != 429 and e.code < 500:
                    break
            except OSError as e:
                error = DataError(f"{self.url} cannot be reached: {e}")
            except (ValueError, KeyError, IndexError, TypeError) as e:
                error = DataError(f"{self.url} gave an answer that is not one of the chat API: {shown(e)}")
                break
            time.sleep(_RETRY_S * attempt)
        return error

    def _ask(self, question: str) -> str:
        key = os.environ.get(self.api_key_env, "")
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.time_limit_s) as answer:
            return str(json.loads(answer.read(_REPLY))["choices"][0]["message"]["content"] or "")
