"""A backward pass without torch's engine, which needs devices to be there, and has no place for those that come later,
as the rehearsal's does."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def go_back(loss: Tensor) -> None:
    """Does what `backward` does, but for gradients of leaves, which it drops."""
    gradients: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)
    gradients[loss.grad_fn][0] = torch.ones_like(loss)
    while gradients:
        node = max(gradients, key=lambda n: n._sequence_nr())  # the last of them that the forward pass has made
        given = gradients.pop(node)
        call = getattr(node, "apply", node)
        results = call(*(given.get(i) for i in range(len(node._input_metadata))))
        results = results if isinstance(results, tuple) else (results,)
        for (before, i), result in zip(node.next_functions, results, strict=False):
            if result is not None and before is not None and before.next_functions:  # else a leaf
                gradients[before][i] = gradients[before][i] + result if i in gradients[before] else result
