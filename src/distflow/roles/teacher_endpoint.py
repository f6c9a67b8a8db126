"""A teacher behind an endpoint that returns the log-probs of a prompt, as vLLM's does. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distflow.algo.options import PositiveCount
from distflow.errors import ConfigError, NodeError, shown
from distflow.flow import node
from distflow.roles.context import RoleContext
from distflow.roles.frozen import SOURCE_COLUMN, TOP, top_fields
from distflow.roles.judge_endpoint import Endpoint, T
from distflow.roles.role import Role
from distflow.roles.trained import TOKENS

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged

_PROBE = "The answer is 3.14 — naïve «code»:\n\tx = [1, 2]\n"  # tokenizers that differ at all differ on such a text
_Entry = Mapping[str, Mapping[str, Any]]  # token id → its log-prob and rank


class TeacherEndpoint(Role):
    """A teacher that a server runs:
    `roles: {teacher: {call: teacher_endpoint, args: {base_url: http://host:8000/v1, name: …}}}`.

    The server takes token ids and `prompt_logprobs`, and has `/tokenize`: vLLM does. It computes at temperature 1.
    """

    def __init__(
        self,
        role: RoleContext,
        base_url: str,
        name: str,
        api_key_env: str = "OPENAI_API_KEY",
        concurrent: int = 16,
        time_limit_s: float = 600.0,
    ) -> None:
        self.role, self.where = role, f"role '{role.name}' (a teacher at {base_url})"
        self.endpoint = Endpoint(base_url, name, api_key_env, concurrent, time_limit_s)
        layout = role.layout("logprobs", "top_logprobs")
        if layout is not None and layout.tp > 1:
            raise ConfigError(f"placement: {self.where} is asked once for each sample; give it tp: 1")
        if role.rollout.temperature not in (0, 1):
            raise ConfigError(
                f"{self.where} computes at temperature 1, and rollout.temperature is {role.rollout.temperature}; set it"
                " to 1, or give the teacher as a model"
            )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        ours = self.role.model.tokenizer(_PROBE, add_special_tokens=False).input_ids
        root = Endpoint(
            self.endpoint.base_url.rstrip("/").removesuffix("/v1"),
            self.endpoint.name,
            self.endpoint.api_key_env,
            1,
            self.endpoint.time_limit_s,
        )
        [theirs] = root.ask("tokenize", [{"prompt": _PROBE, "add_special_tokens": False}], lambda a: a["tokens"])
        if isinstance(theirs, Exception):
            raise ConfigError(f"{self.where}: cannot compare its tokenizer with the model's: {theirs}")
        if list(theirs) != list(ours):
            raise ConfigError(
                f"{self.where} has another tokenizer than '{self.role.model.name}', and reads its tokens; give a model"
                " of the same family"
            )

    @node(type="inference", writes="{role}_logprobs", optional="response_branches", ignores=SOURCE_COLUMN)
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Asks for the log-probs of the response tokens."""
        import torch

        from distflow.batch.batch import Ragged

        def read(entry: _Entry, token: int) -> float:
            return float(entry[str(token)]["logprob"])

        lengths = batch["response_tokens"].lengths
        return Ragged.packed(torch.tensor(self._ask(batch, 0, read), dtype=torch.float32), lengths)

    @node(type="inference", writes=TOP, optional="response_branches", ignores=SOURCE_COLUMN)
    def top_logprobs(self, batch: "Batch", k: PositiveCount) -> dict[str, Any]:
        """Asks for the k likeliest tokens at the place of each response token, and their log-probs."""
        import torch

        from distflow.batch.batch import Ragged

        def read(entry: _Entry, token: int) -> list[tuple[int, float]]:
            best = sorted(entry.items(), key=lambda e: -e[1]["logprob"])[:k]
            if len(best) < k:
                raise NodeError(
                    f"{self.where} gave {len(best)} log-probs for a token, not {k}; start it with --max-logprobs {k}"
                )
            return [(int(i), float(e["logprob"])) for i, e in best]

        lengths = batch["response_tokens"].lengths
        both = torch.tensor(self._ask(batch, k, read), dtype=torch.float64).view(-1, k, 2)
        columns = both[..., 0].int(), both[..., 1].float()
        return top_fields(self.role, [Ragged.packed(c, lengths, (k,)) for c in columns])

    def _ask(self, batch: "Batch", k: int, read: Callable[[_Entry, int], T]) -> list[T]:
        """Returns what `read` finds for every response token."""
        if "response_branches" in batch:
            raise NodeError(
                f"{self.where}: samples with several histories are not supported; give the teacher as a model"
            )
        pairs = list(zip(*([row.tolist() for row in batch[f]] for f in TOKENS), strict=True))
        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        bodies = [{"prompt": [*prompt, *response], **options} for prompt, response in pairs]
        answers = self.endpoint.ask("completions", bodies, lambda a: list(a["choices"][0]["prompt_logprobs"]))
        result: list[T] = []
        for sample, (prompt, response), entries in zip(batch.ids.tolist(), pairs, answers, strict=True):
            if isinstance(entries, Exception):
                raise NodeError(f"{self.where}: no log-probs of sample {sample}: {entries}")
            try:
                result += [read(e, t) for e, t in zip(entries[len(prompt) :], response, strict=True)]
            except (ValueError, KeyError, TypeError) as e:
                raise NodeError(f"{self.where}: its log-probs of sample {sample} do not fit: {shown(e)}") from None
        return result
