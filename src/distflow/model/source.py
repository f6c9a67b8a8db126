"""A model to start from: a name on the hub, a directory, or an architecture with random weights.

Weights are read in parts, so that a worker never holds more than its own shard.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from distflow.config.schema import MIXTURES, WITH_VISION, ModelConfig, VisionConfig
from distflow.errors import ConfigError, cut, short_reason, suggest
from distflow.model import attention
from distflow.model.experts import use_experts_blocks
from distflow.model.processor import BOTH_WAYS, open_processor, reads_images
from distflow.model.small_vision import add_image_tokens, small_config, small_processor
from distflow.model.stored_names import Read as Read
from distflow.model.stored_names import stored_tensors
from distflow.model.tokenizer import train_tokenizer
from distflow.util.alike import warn_alike

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Shapes = Mapping[str, Sequence[int]]
Head = Literal["lm", "value"]  # the output for a token: logits over the vocabulary, or one number
VALUE_HEAD = "score.weight"


@dataclass(frozen=True)
class Source:
    """The origin of a model's config, tokenizer and weights."""

    name: str
    config: PreTrainedConfig
    tokenizer: Tokenizer
    folder: Path | None = None  # where the weights are; None: random, from `seed`
    seed: int = 0
    remote_code: bool = False
    head: Head = "lm"
    weights: Read | None = None  # reads them from elsewhere, such as a checkpoint
    processor: Any = None  # of images, if the model has a vision tower

    def with_value_head(self) -> "Source":
        """Returns the same model with a value head; a new head outputs 0 at first."""
        config = copy(self.config)
        config.num_labels = 1
        return replace(self, config=config, head="value")

    @property
    def address(self) -> str | None:
        """Returns the name on the hub or the directory of the model; None if its weights are random."""
        if self.folder is None:
            return None
        return self.name if self.folder.parent.name == "snapshots" else str(self.folder.resolve())

    @property
    def has_value_head(self) -> bool:
        return self.folder is not None and VALUE_HEAD in self._files

    @property
    def model_class(self) -> Any:
        """Returns the class of transformers that loads the model."""
        if self.head == "value" and not reads_images(self.config):
            return AutoModelForSequenceClassification
        return AutoModelForImageTextToText if reads_images(self.config) else AutoModelForCausalLM

    def skeleton(self) -> PreTrainedModel:
        """Returns the model with its parameters on the meta device."""
        with _parameters_on_meta():
            model = self.model_class.from_config(  # which changes the config's dtype
                deepcopy(self.config),
                attn_implementation=self.attention,
                dtype=torch.float32,
                trust_remote_code=self.remote_code,
            )
            if self.head == "value" and reads_images(self.config):
                model.lm_head, model._tied_weights_keys = None, {}  # there is nothing left to tie
                model.score = nn.Linear(self.config.get_text_config().hidden_size, 1, bias=False)
        if not getattr(model, "_supports_attention_backend", False):
            raise ConfigError(f"model: '{self.name}' is a {self.config.model_type}, which brings its own attention")
        if self.config.model_type in BOTH_WAYS:
            raise ConfigError(
                f"model: in a {self.config.model_type} the tokens of an image attend to each other in both directions,"
                " and attention here is causal; give a model of another family, such as Qwen3-VL"
            )
        use_experts_blocks(model)
        model.tie_weights()
        model.eval()
        assert isinstance(model, PreTrainedModel)
        return model

    @property
    def attention(self) -> Any:
        """Ours in the language model; what is beside it is no sequence of tokens, and keeps torch's."""
        text = self.config.get_text_config()
        if text is self.config:
            return attention.NAME
        parts = {
            name: attention.NAME if getattr(self.config, name) is text else "sdpa" for name in self.config.sub_configs
        }
        return {"": attention.NAME, **parts}

    def reader(self, shapes: Shapes) -> Read:
        """Returns a function that reads a part of a parameter, by its name in the skeleton.

        Raises if the weights have another shape than the skeleton's: `shapes`, by name.
        """
        if self.weights is not None:
            return self.weights
        files = self._files if self.folder else {}
        if self.head == "value" and VALUE_HEAD not in files:
            rest = replace(self, head="lm").reader({n: s for n, s in shapes.items() if n != VALUE_HEAD})
            head = torch.zeros(1, self.config.get_text_config().hidden_size)
            return lambda name, part: head[part] if name == VALUE_HEAD else rest(name, part)
        stored = stored_tensors(shapes, files)
        wanted = dict(shape for tensor in stored.values() for shape in tensor.shapes())
        if files and all(n in files for n in wanted):
            opened = {f: safe_open(f, "pt") for f in set(files.values())}
            self._check_shapes(wanted, {n: opened[files[n]].get_slice(n).get_shape() for n in wanted}, files)
            return lambda name, part: stored[name].read(lambda n, p: opened[files[n]].get_slice(n)[p], part)
        if files:
            missing = next(n for n in wanted if n not in files)
            text = "model: '%s' has no tensor '%s'; every worker reads the whole model, to find it under another name"
            warn_alike(logger, text, self.name, cut(missing))
        whole = self._whole()
        stored = stored_tensors(shapes, whole)
        wanted = dict(shape for tensor in stored.values() for shape in tensor.shapes())
        self._check_shapes(wanted, {n: p.shape for n, p in whole.items()}, {})
        return lambda name, part: stored[name].read(lambda n, p: whole[n][p], part)

    def _check_shapes(self, wanted: Shapes, stored: Shapes, files: Mapping[str, str]) -> None:
        """Raises if a tensor has another shape than the config asks for: a part of it would be read silently."""
        wrong = [n for n in wanted if tuple(stored.get(n, ())) != tuple(wanted[n])]
        if not wrong:
            return
        name, others = wrong[0], f" ({len(wrong) - 1} others differ, too)" if len(wrong) > 1 else ""
        found = f"has the shape {list(stored[name])}" if name in stored else "is missing"
        raise ConfigError(
            f"model: the tensor '{cut(name)}' in {files.get(name, self.folder)} {found}, and config.json asks for"
            f" {list(wanted[name])}{others}; correct config.json, or get config and weights of one model again"
        )

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Parameter → the safetensors file it is in."""
        assert self.folder is not None
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            for file in set(places.values()):
                if "/" in file or not (self.folder / file).is_file():
                    raise ConfigError(f"model: {index} names a file that is not beside it, '{cut(file)}'")
            return {name: str(self.folder / file) for name, file in places.items()}
        single = self.folder / "model.safetensors"
        if not single.exists():
            return {}
        with safe_open(single, "pt") as f:
            return dict.fromkeys(f.keys(), str(single))

    def _whole(self) -> Mapping[str, Tensor]:
        """Returns all weights at once: random ones, or from files that cannot be read in parts."""
        if self.folder is None:
            state = torch.get_rng_state()
            torch.manual_seed(self.seed)
            model = self.model_class.from_config(deepcopy(self.config), dtype=torch.float32)
            torch.set_rng_state(state)
        else:
            loading: Any = self.model_class.from_pretrained(
                self.folder,
                dtype="auto",  # as it is stored: float32 may be twice that, on every rank of a host
                trust_remote_code=self.remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            model, loaded = loading
            mismatched = {name: tuple(stored) for name, stored, _ in loaded["mismatched_keys"]}
            wrong = {n: p.shape for n, p in model.named_parameters() if n in loaded["missing_keys"] or n in mismatched}
            self._check_shapes(wrong, mismatched, {})  # instead, they would have random weights
        return dict(model.named_parameters(remove_duplicate=False))


def open_model(given: ModelConfig, texts: Callable[[], Iterator[str]], base: Path, seed: int) -> Source:
    """Opens the model that the config names; `texts` train the tokenizer of a model with random weights."""
    if given.arch is not None:
        return _fresh(given, texts, seed)
    assert given.path is not None
    folder = find_folder(given.path, base)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=given.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=given.trust_remote_code)
    except (OSError, ValueError) as e:
        raise ConfigError(f"model: '{given.path}' cannot be loaded: {short_reason(e)}") from None
    _without_dropout(config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model: the tokenizer of '{given.path}' has no eos_token; responses could not end")
    processor = open_processor(Path(folder), config, tokenizer) if reads_images(config) else None
    return Source(given.path, config, tokenizer, Path(folder), seed, given.trust_remote_code, processor=processor)


def _fresh(given: ModelConfig, texts: Callable[[], Iterator[str]], seed: int) -> Source:
    assert given.arch is not None
    if given.arch not in CONFIG_MAPPING:
        known = ("gemma", "llama", "mistral", "qwen2", "qwen3", *MIXTURES, *WITH_VISION)
        raise ConfigError(f"model.arch: '{given.arch}' is not one of transformers{suggest(given.arch, known)}")
    tokenizer = train_tokenizer(texts(), given.vocab)
    vision = (given.vision or VisionConfig()) if given.arch in WITH_VISION else None
    if vision:
        add_image_tokens(tokenizer, given.arch)
    heads = given.heads or max(1, given.hidden // 64)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": given.hidden,
        "intermediate_size": given.ffn or 4 * given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": given.kv_heads or heads,
        "head_dim": given.hidden // heads,
        "max_position_embeddings": given.positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **_mixture(given),
    }
    try:
        config = (
            small_config(given.arch, shape, vision, tokenizer) if vision else AutoConfig.for_model(given.arch, **shape)
        )
    except ConfigError:
        raise
    except Exception as e:  # each architecture has its own way to refuse
        raise ConfigError(f"model.arch: a small '{given.arch}' cannot be built: {short_reason(e)}") from None
    _without_dropout(config)
    processor = small_processor(given.arch, config, vision, tokenizer) if vision else None
    return Source(f"{given.arch} with random weights", config, tokenizer, seed=seed, processor=processor)


def _mixture(given: ModelConfig) -> dict[str, Any]:
    """Returns what the config of a mixture of experts has beside that of a dense model."""
    if given.arch not in MIXTURES:
        return {}
    experts, active = given.mixture
    each = {"num_experts_per_tok": active, "moe_intermediate_size": given.ffn or 4 * given.hidden}
    return each | {"num_experts": experts, "num_local_experts": experts, "norm_topk_prob": True}


def find_folder(name: str, base: Path, files: str | None = None) -> Path:
    """Returns the directory of a model: as given, or downloaded from the hub (or found in its cache).

    `files`: a pattern of the files to load; by default all that a model may be read from.
    """
    try:
        path = base / Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as e:  # a name too long, no such user
        raise ConfigError(f"model: '{cut(name)}' cannot be looked up: {e}") from None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name on the hub looks like this
        near = suggest(path.name, (p.name for p in path.parent.iterdir() if p.is_dir())) if path.parent.is_dir() else ""
        raise ConfigError(f"model: there is no directory {path}{near}")
    from huggingface_hub import snapshot_download

    try:
        ignored = ["*.bin", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=ignored))
    except Exception as e:  # the hub's client has many errors: not found, no access, no network, no cache
        raise ConfigError(
            f"model: '{name}' is neither a directory ({path}) nor a model that the hub gives us: {short_reason(e)};"
            " check the name, your access (HF_TOKEN) and the network, or give a directory"
        ) from None


def _without_dropout(config: PreTrainedConfig) -> None:
    """Turns dropout off: it would make the trainer's log-probs differ from the rollout's."""
    for key, value in config.to_dict().items():
        if "dropout" in key and isinstance(value, float):
            setattr(config, key, 0.0)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Creates modules with parameters on the meta device; buffers, which are in no file, are real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def kv_bytes(config: PreTrainedConfig, dtype: torch.dtype, tp: int) -> int:
    """Returns the bytes of KV cache that one token takes."""
    c: Any = config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return int(2 * c.num_hidden_layers * heads * head_dim(config) * dtype.itemsize // tp)


def head_dim(config: PreTrainedConfig) -> int:
    c: Any = config.get_text_config()
    return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
