"""Generation with a vision-language model: prompts have images, and positions along several axes."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.model.attention import Attention
from distflow.model.images import Images, Processed, batch_of_one, join_images
from distflow.rollout.builtin.sequence import Sequence


class Vision:
    """Runs `model` on prompts with their images. Sampled tokens need no more than their positions."""

    def __init__(self, model: PreTrainedModel, images: Images, device: torch.device) -> None:
        self.model, self.images, self.device = model, images, device

    def prefill(self, prompts: list[list[Sequence]], attention: Attention, last: Tensor) -> Tensor:
        """Returns the logits behind the last token of each prompt.

        Also notes how positions go on behind it, in all sequences that share it.
        """
        tokens: list[Tensor] = []
        positions: list[Tensor] = []
        images: list[Processed] = []
        for sequences in prompts:
            request, reused = sequences[0].request, sequences[0].reused
            prompt = torch.tensor(request.prompt)
            whole = self.images.positions(self.model, prompt, self.images.of(request.images))
            for s in sequences:
                s.ahead = int(whole.max()) + 1 - len(prompt)
            tokens.append(prompt[reused:])
            positions.append(whole[..., reused:])
            images += self.images.of([p.reference for p in sequences[0].places if p.start >= reused])
        out = self.model(
            input_ids=torch.cat(tokens)[None].to(self.device),
            position_ids=batch_of_one(torch.cat(positions, -1)).to(self.device),
            use_cache=False,
            logits_to_keep=last.to(self.device),
            distflow=attention,
            **{name: tensor.to(self.device) for name, tensor in join_images([i.tensors for i in images]).items()},
        )
        logits: Tensor = out.logits[0]
        return logits

    def of_sampled(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Returns the newest token of each sequence as the model reads it, and its position."""
        tokens = self.images.as_read(torch.tensor([s.tokens[-1] for s in sequences]))
        return tokens, torch.tensor([s.length - 1 + s.ahead for s in sequences])
