"""The actor's model where it is trained and where it generates, and the hand-over of weights from one to the other."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from distflow.data.exchange import Collective
from distflow.data.transport import report_lost_peers
from distflow.engine.model.source import DTYPES
from distflow.engine.model.text import Text, prompt_limit
from distflow.engine.role_context import RoleContext
from distflow.engine.rollout.builtin import BuiltinEngine
from distflow.engine.rollout.engine import SamplingParams
from distflow.engine.train.trainer import Trainer, make_trainer
from distflow.engine.weights import HandOver, Shards


class Policy:
    """On one rank: a trainer if the actor is trained (or asked for log-probs) here, an engine if it generates here."""

    def __init__(self, role: RoleContext) -> None:
        source, config = role.model, role.rollout
        self.text = Text(source, prompt_limit(source, config.max_tokens, role.max_prompt))
        trained = role.layout("update", "update_pairs", "logprobs")
        generates = role.layout("generate")
        trainable = not {"update", "update_pairs"}.isdisjoint(role.layouts)
        lora = role.train.lora if trainable else None
        self.trainer: Trainer | None = None
        if trained and role.rank in trained.ranks:
            self.trainer = make_trainer(role, source, trained, role.train, trainable, lora)
        self.engine: BuiltinEngine | None = None
        dtype = DTYPES[role.train.dtype]
        if generates and role.rank in generates.ranks:
            self.engine = BuiltinEngine(
                source, generates, role.meshes[generates], role.rank, config, dtype, role.device
            )
        self.sampling = SamplingParams(
            config.max_tokens,
            config.temperature,
            config.top_p,
            config.top_k,
            config.min_tokens,
            self.text.stop_tokens(source, config.stop),
        )
        self.weight_version = 0  # of the next hand-over
        # The engine may use the very memory of the trainer's weights: an update is then seen at once.
        self.shares_weights = (
            trained == generates and trained is not None and trained.dp == 1 and lora is None and dtype == torch.float32
        )
        self.transfer: HandOver | None = None
        if self.engine and not trained:
            self.engine.weights.read(source)
        elif self.engine and self.trainer and self.shares_weights:
            self.engine.weights.use(self.trainer.weights())
        elif trained and generates:
            specs = self.trainer.specs if self.trainer else self.engine.weights.specs if self.engine else []
            self.transfer = HandOver(specs, Shards(trained, True), Shards(generates, False), role.rank, dtype)

    def hand_over(self) -> Iterator[Collective]:
        """Moves the newest weights to the engines; all ranks that train or generate take part."""
        if self.transfer:
            held: Mapping[str, Tensor] = {}
            if self.trainer:
                with report_lost_peers(self.trainer.layout.ranks):
                    held = self.trainer.weights()
            yield from self.transfer.run(held, self.engine.weight_targets() if self.engine else {})
        if self.engine:
            self.engine.commit_weights(self.weight_version)
        self.weight_version += 1

    def release_engine_memory(self) -> None:
        """Gives back what the next hand-over fills again: training needs the memory."""
        if self.engine and self.transfer:
            self.engine.release_memory()
