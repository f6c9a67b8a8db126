"""The actor's model where it is trained and where it generates, and the hand-over of weights from one to the other."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from distflow.data.collectives import SendReceive
from distflow.data.transport import report_lost_peers
from distflow.engine.hand_over import HandOver
from distflow.engine.model.source import DTYPES
from distflow.engine.model.text import Text, prompt_limit
from distflow.engine.role_context import RoleContext, shard_degree
from distflow.engine.rollout.builtin import BuiltinEngine
from distflow.engine.rollout.engine import RolloutEngine, SamplingParams
from distflow.engine.train.trainer import Trainer, make_trainer
from distflow.engine.weights import Shards


class Policy:
    """Holds, on one rank, a trainer if the actor is trained (or gives log-probs) here, an engine if it generates."""

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
        self.engine: RolloutEngine | None = None
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
        self.transfer: HandOver | None = None  # None: the engine has its weights already
        if trained is None:
            if self.engine:
                self.engine.read_weights(source)
        elif generates:
            shards = Shards(trained, shard_degree(role.train, trained, role.name))
            if not self._shares_weights(trained == generates and shards.shard == 1 and lora is None):
                specs = self.trainer.specs if self.trainer else self.engine.weight_specs if self.engine else []
                self.transfer = HandOver(specs, shards, Shards(generates, 1), role.rank, dtype, role.topology)

    def _shares_weights(self, whole: bool) -> bool:
        """Whether the engine uses the trainer's own tensors, which it can if this rank has `whole` weights of both."""
        return bool(whole and self.engine and self.trainer and self.engine.share_weights(self.trainer.weights()))

    def hand_over(self) -> Iterator[SendReceive]:
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
        """Gives back the KV cache and the weights that the next hand-over fills again: training needs the memory."""
        if self.engine:
            self.engine.release_memory(weights=self.transfer is not None)
