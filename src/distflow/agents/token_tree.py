"""The token sequences of a session as one tree, which holds shared beginnings once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distflow.agents.session import Branch
from distflow.util.arrays import Ints


@dataclass
class TokenTree:
    """The fields of a sample with several sequences; see distflow.batch.branches. All lists of tokens are parallel."""

    prompt: list[int]  # of the first sequence
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights; −1 for context
    turn_rewards: list[float] = field(default_factory=list)
    branches: list[tuple[int, int, int]] = field(default_factory=list)  # start, parent, shared
    prompt_images: list[str] = field(default_factory=list)
    response_images: list[str] = field(default_factory=list)  # in the order of their tokens


def token_tree(branches: Sequence[Branch]) -> TokenTree:
    """Joins branches in the order of their first generations: a turn is in the one that it was generated for."""
    tree = TokenTree(branches[0].prompt)
    tree.prompt_images = [p.reference for p in branches[0].images if p.start < len(tree.prompt)]
    numbers: dict[str, int] = {}  # of the images
    paths: list[Ints] = []
    for branch in branches:
        own = len(branch.prompt) + branch.own_turns[0].start  # nothing from here on is another branch's
        path = np.array([*branch.prompt, *branch.tokens[: branch.end]], np.int64)
        for place in branch.images:  # whose tokens are those of any other of this size
            path[place.start : place.end] = -1 - numbers.setdefault(place.reference, len(numbers))
        parent, shared = 0, len(branch.prompt)
        if paths:
            common = [_common(known, path[:own]) for known in paths]
            parent = int(np.argmax(common))
            shared = common[parent]
            tree.branches.append((len(tree.tokens), parent, shared))
        paths.append(path)
        _append(tree, branch, shared)
    return tree


def _append(tree: TokenTree, branch: Branch, shared: int) -> None:
    """Appends the tokens of a branch after the first `shared` ones; a prompt's among them are context."""
    context = max(0, len(branch.prompt) - shared)
    kept = max(0, shared - len(branch.prompt))
    tree.tokens += branch.prompt[len(branch.prompt) - context :] + branch.tokens[kept : branch.end]
    tree.mask += [0] * context + [int(m) for m in branch.mask[kept : branch.end]]
    tree.logprobs += [0.0] * context + branch.logprobs[kept : branch.end]
    tree.versions += [-1] * context + branch.versions[kept : branch.end]
    rewards = [0.0] * branch.end
    for turn in branch.own_turns:
        rewards[turn.start + turn.length - 1] += turn.reward or 0.0
    tree.turn_rewards += [0.0] * context + rewards[kept:]
    ends = len(branch.prompt) + branch.end
    tree.response_images += [p.reference for p in branch.images if shared <= p.start < ends]


def _common(one: Ints, other: Ints) -> int:
    """Returns how many tokens two sequences share from the beginning."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def compactions(branches: Sequence[Branch]) -> int:
    """Counts histories that replaced all earlier ones: they contain no sampled turn, and no earlier one went on.

    Asking the same again is another try, not a compaction, whether both are asked at once or one after the other.
    """
    return sum(
        not branch.inherited and all(b.last < branch.first and b.prompt != branch.prompt for b in branches[:i])
        for i, branch in enumerate(branches)
        if i
    )
