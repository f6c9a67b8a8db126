"""A model to start from: found or refused with a way out, read in parts, or random and the same everywhere."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError
from distflow.model.attention import NAME
from distflow.model.source import Source, open_model

SMALL: dict[str, Any] = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}


def texts() -> Iterator[str]:
    return iter(["some text to learn from"])


def fresh(seed: int = 0, **changes: Any) -> Source:
    return open_model(ModelConfig(**{**SMALL, **changes}), texts, Path(), seed)


def opened(path: str, base: Path) -> Source:
    return open_model(ModelConfig(path=path), texts, base, 0)


def read_all(source: Source) -> dict[str, Tensor]:
    parameters = dict(source.skeleton().named_parameters())
    read = source.reader({n: p.shape for n, p in parameters.items()})
    return {n: read(n, tuple(slice(0, k) for k in p.shape)) for n, p in parameters.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model in a directory, in several files, and its weights."""
    folder = tmp_path_factory.mktemp("models") / "small"
    source = fresh()
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    source.tokenizer.save_pretrained(folder)
    return folder, {n: p.detach() for n, p in model.named_parameters()}


def test_any_part_is_read_from_a_directory(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    assert len(list(folder.glob("*.safetensors"))) > 2
    source = opened(str(folder), Path())
    read = source.reader({n: w.shape for n, w in weights.items()})
    for name, whole in weights.items():
        n = len(whole)
        rest = tuple(slice(0, k) for k in whole.shape[1:])
        for first in (slice(0, n), slice(n // 3, n // 2), slice(n - 1, n), slice(n, n)):  # the last is an empty shard
            assert torch.equal(read(name, (first, *rest)), whole[first])
        if whole.ndim > 1:
            assert torch.equal(read(name, (slice(0, n), slice(3, 9))), whole[:, 3:9])
    assert "_whole" not in vars(source)  # it was never held


def test_a_single_file_is_read_in_parts(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.bfloat16).save_pretrained(tmp_path)
    fresh().tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    source = opened(str(tmp_path), Path())
    got = read_all(source)
    assert got.keys() == saved[1].keys()
    assert all(torch.equal(x, saved[1][n].bfloat16()) for n, x in got.items())
    assert "_whole" not in vars(source)


def test_tensors_under_other_names_are_found_and_it_is_said_that_this_takes_memory(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("model*"):
        file.unlink()
    renamed = {n.removeprefix("model."): t.bfloat16().contiguous() for n, t in saved[1].items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = read_all(opened(str(tmp_path), Path()))
    assert all(torch.equal(x, saved[1][n].bfloat16()) for n, x in got.items())
    assert {x.dtype for x in got.values()} == {torch.bfloat16}  # as it is stored
    assert "has no tensor 'model." in caplog.text
    assert "every worker reads the whole model" in caplog.text


def test_other_file_formats_are_read_at_once(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(saved[1], tmp_path / "pytorch_model.bin")
    got = read_all(opened(str(tmp_path), Path()))
    assert got.keys() == saved[1].keys()
    assert all(torch.equal(x, saved[1][n]) for n, x in got.items())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [1, 40, 64])
def test_tensors_of_another_shape_than_the_config_s_are_refused(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, file: str, size: int
) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    if file == "pytorch_model.bin":
        for part in tmp_path.glob("model*"):
            part.unlink()
        torch.save(saved[1], tmp_path / file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": size}))
    with pytest.raises(ConfigError) as e:
        read_all(opened(str(tmp_path), Path()))
    assert "the tensor 'model.layers.0.mlp.gate_proj.weight' in " in str(e.value)
    assert f"has the shape [48, 32], and config.json asks for [{size}, 32] (5 others differ, too)" in str(e.value)
    assert str(tmp_path) in str(e.value)


def test_a_tensor_that_no_file_has_is_refused(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    for part in tmp_path.glob("model*"):
        part.unlink()
    torch.save({n: t for n, t in saved[1].items() if n != "model.norm.weight"}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' in .* is missing, and config.json asks for \[32\]"):
        read_all(opened(str(tmp_path), Path()))


def test_a_directory_is_looked_up_from_the_folder_of_the_config(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = saved
    for path in ("small", "./small", str(folder)):
        assert read_all(opened(path, folder.parent)).keys() == weights.keys()


@pytest.mark.parametrize("path", ["./smal", "../models/smal", "/{}/smal"])
def test_a_missing_directory_is_an_error_with_a_suggestion(path: str, tmp_path: Path) -> None:
    base = tmp_path / "models"
    (base / "small").mkdir(parents=True)
    path = path.replace("/{}", str(base))
    with pytest.raises(ConfigError, match=r"model: there is no directory .*/smal; did you mean 'small'\?"):
        opened(path, base)
    with pytest.raises(ConfigError, match=r"model: there is no directory /no/such/place"):
        opened("/no/such/place", base)


def test_a_name_that_the_hub_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(name: str, **_: Any) -> str:
        asked.append(name)
        raise RuntimeError("404 not found.\nmore about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError) as e:
        opened("someone/model", tmp_path)
    assert "'someone/model' is neither a directory" in str(e.value)
    assert "hub gives us: 404 not found; check the name, your access (HF_TOKEN)" in str(e.value)
    assert asked == ["someone/model"]


def test_a_model_from_the_hub_is_opened(saved: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(saved[0]))
    source = opened("someone/model", Path("/"))
    assert source.name == "someone/model"
    assert read_all(source).keys() == saved[1].keys()


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: '.*' cannot be loaded: "):
        opened(str(tmp_path), Path())


def test_a_tokenizer_without_an_eos_token_is_an_error(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    tokenizer = fresh().tokenizer
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no eos_token; responses could not end"):
        opened(str(tmp_path), Path())


@pytest.mark.parametrize(("arch", "near"), [("qwen22", "did you mean 'qwen2'?"), ("lama", "did you mean 'llama'?")])
def test_an_unknown_architecture_is_an_error_with_a_suggestion(arch: str, near: str) -> None:
    with pytest.raises(ConfigError) as e:
        fresh(arch=arch)
    assert f"model.arch: '{arch}' is not one of transformers" in str(e.value)
    assert near in str(e.value)


def test_an_architecture_with_attention_of_its_own_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is a bloom, which brings its own attention"):
        fresh(arch="bloom").skeleton()


def test_a_skeleton_has_parameters_on_meta_and_real_buffers(saved: tuple[Path, dict[str, Tensor]]) -> None:
    source = opened(str(saved[0]), Path())
    model = source.skeleton()
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())  # no file brings them
    assert not model.training
    assert model.config._attn_implementation == NAME
    tied = model.get_output_embeddings().weight
    assert tied is model.get_input_embeddings().weight
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in saved[1].items()}


def test_modules_made_after_a_skeleton_have_memory() -> None:
    fresh().skeleton()
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_the_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(1)
    first = read_all(fresh(seed=5))
    torch.manual_seed(2)
    again, other = read_all(fresh(seed=5)), read_all(fresh(seed=6))
    assert first.keys() == again.keys()
    assert all(torch.equal(x, again[n]) for n, x in first.items())
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_random_weights_leave_the_global_generator_as_it_was() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    read_all(fresh(seed=5))
    assert torch.equal(torch.rand(4), want)


def test_a_model_with_random_weights_has_the_configured_size() -> None:
    source = fresh(vocab=270, positions=99)
    config, shapes = source.config, {n: tuple(p.shape) for n, p in source.skeleton().named_parameters()}
    assert len(source.tokenizer) == config.vocab_size
    assert config.eos_token_id == source.tokenizer.eos_token_id
    assert config.max_position_embeddings == 99
    assert shapes["model.embed_tokens.weight"] == (config.vocab_size, 32)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (48, 32)
    assert not any(n.startswith("model.layers.2") for n in shapes)


def test_dropout_is_off(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """The trainer's log-probs would differ from the rollout's."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    config = opened(str(saved[0]), Path()).config
    config.attention_dropout = 0.1
    config.save_pretrained(tmp_path)
    assert '"attention_dropout": 0.1' in (tmp_path / "config.json").read_text()
    assert opened(str(tmp_path), Path()).config.attention_dropout == 0
