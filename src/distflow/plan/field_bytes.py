"""Expected sizes of the fields that the built-in roles read and write."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FieldBytes:
    """The bytes of a field: per sample, per token of its prompt and per token of its response."""

    sample: float = 0.0
    prompt_token: float = 0.0
    response_token: float = 0.0

    def of(self, prompt_tokens: float, response_tokens: float) -> int:
        """Returns the bytes of a sample with this many tokens."""
        return round(self.sample + self.prompt_token * prompt_tokens + self.response_token * response_tokens)


_PER_TOKEN = FieldBytes(response_token=4)
# As they are stored: int64 tokens, float32 numbers, text of 4 bytes a token.
KNOWN_FIELDS: Mapping[str, FieldBytes] = {
    "prompt": FieldBytes(prompt_token=4),
    "prompt_tokens": FieldBytes(prompt_token=8),
    "response": _PER_TOKEN,
    "response_tokens": FieldBytes(response_token=8),
    "rollout_logprobs": _PER_TOKEN,
    "token_versions": _PER_TOKEN,
    "old_logprobs": _PER_TOKEN,
    "ref_logprobs": _PER_TOKEN,
    "ema_logprobs": _PER_TOKEN,
    "old_entropy": _PER_TOKEN,
    "old_values": _PER_TOKEN,
    "returns": _PER_TOKEN,
    "raw_advantage": _PER_TOKEN,
    "images": FieldBytes(sample=80),  # the reference of one
    "prompt_images": FieldBytes(sample=80),
    "response_images": FieldBytes(sample=1e5),  # a screenshot, encoded
}
IMAGES = "images"  # references to the images of a prompt, not their pixels
PROMPT_IMAGES, RESPONSE_IMAGES = "prompt_images", "response_images"  # those of a conversation
SCORE = "score"  # what a reward writes
PROMPT_TOKENS = 512  # of a prompt, unless the config has a lower limit


def has_references(field: str) -> bool:
    """Returns whether a field has references to images."""
    return field == IMAGES or field.endswith((PROMPT_IMAGES, RESPONSE_IMAGES))


def known_field(name: str, width: int = 1) -> FieldBytes | None:
    """Returns the size of a field, also with a prefix (`greedy_response`) or of a role (`teacher_logprobs`).

    `width`: numbers for each token, of a field that may have several.
    """
    if name in KNOWN_FIELDS:
        return KNOWN_FIELDS[name]
    if name == "prompt_experts":
        return FieldBytes(prompt_token=width)
    if name == "response_experts":
        return FieldBytes(response_token=width)
    if name.endswith(("_top_ids", "_top_logprobs")):
        return FieldBytes(response_token=4 * width)
    if name.endswith("_logprobs"):
        return _PER_TOKEN
    return next((size for known, size in KNOWN_FIELDS.items() if name.endswith(f"_{known}")), None)
