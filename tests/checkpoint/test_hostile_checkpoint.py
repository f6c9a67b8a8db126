"""`export` of a checkpoint that somebody else has made: it runs nothing of it, and reads no file outside of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.checkpoint.export import export
from distflow.checkpoint.store import file_list, sha256
from distflow.checkpoint.writer import CheckpointWriter
from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError, DistflowError
from distflow.model.description import describe
from distflow.model.source import Source, open_model
from distflow.run_folder import COMPLETE, checkpoint_dir
from distflow.weights.state import RoleState
from full import largest_file
from threads import alone

CODE = "import os, pathlib\npathlib.Path(__file__)\nopen({!r}, 'w').close()\n"


@pytest.fixture(scope="module")
def source() -> Source:
    model = ModelConfig(arch="llama", hidden=16, layers=1, vocab=300, positions=32)
    return open_model(model, lambda: iter(["some text"]), Path(), 0)


@pytest.fixture
def run(source: Source, tmp_path: Path) -> Path:
    """A run with one checkpoint, of which anything may be changed before it is `sealed` again."""
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", 0, (0,), {"actor": (0,)}, alone)
    read = source.reader(shapes := {n: p.shape for n, p in source.skeleton().named_parameters()})
    weights = {f"weights.{n}": read(n, ()) for n in shapes}
    parts = writer.copy({"actor": RoleState({}, weights)})
    writer.save(1, parts, {"position": 0}, lambda path: describe(path / "actor", source))
    writer.wait()
    writer.close()
    return tmp_path / "run"


def sealed(run: Path, **more: tuple[int, str]) -> Path:
    """Lists the files of the checkpoint anew, as its author would, and more."""
    path = checkpoint_dir(run / "checkpoints", 1)
    listed = [p for p in path.rglob("*") if p.name != COMPLETE and p.is_file()]
    files = {str(p.relative_to(path)): (p.stat().st_size, sha256(p)) for p in listed}
    (path / COMPLETE).write_text(file_list(1, files | more))
    return run


def actor(run: Path) -> Path:
    return checkpoint_dir(run / "checkpoints", 1) / "actor"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    contents = json.loads(file.read_text())
    change(contents)
    file.write_text(json.dumps(contents))


def test_an_honest_one(run: Path, tmp_path: Path) -> None:
    out = export(sealed(run), tmp_path / "out")
    assert (out / "model.safetensors").exists()
    assert (out / "tokenizer.json").exists()


def test_one_that_finds_no_room_for_its_export(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with largest_file(8192), pytest.raises(ConfigError) as raised:
        export(sealed(run), out)
    assert str(raised.value).startswith(f"{out}: the weights could not be written: ")
    assert "File too large" in str(raised.value)
    assert str(raised.value).endswith(f"; see to it that {out} can be written")
    assert not list(out.iterdir())
    assert (export(run, out) / "model.safetensors").exists()


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_its_code_is_never_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("transformers asks whether to run the code")

    monkeypatch.setattr("builtins.input", asked)
    model, trace = actor(run) / "model", tmp_path / "trace"
    (model / "own.py").write_text(CODE.format(str(trace)))
    classes = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", "own.T"]}
    edit(model / where, lambda c: c.update(auto_map=classes, model_type="own", tokenizer_class="Own"))
    with pytest.raises(ConfigError, match="never run"):
        export(sealed(run), tmp_path / "out")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "special_tokens_map.json"])
def test_links_out_of_it_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("{}")
    (actor(run) / "model" / name).unlink(missing_ok=True)
    (actor(run) / "model" / name).symlink_to(tmp_path / "secret")
    for listed in (True, False):
        if not listed:
            sealed(run)
            edit(checkpoint_dir(run / "checkpoints", 1) / COMPLETE, lambda c: None)
        with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
            export(sealed(run) if listed else run, tmp_path / "out")


def test_files_outside_of_it_are_not_read(run: Path, tmp_path: Path) -> None:
    for name in ("/dev/zero", "../../../secret", "actor/../../../secret", "/etc/hostname"):
        with pytest.raises(ConfigError, match="names a file that is not in it"):
            export(sealed(run, **{name: (1, "0")}), tmp_path / "out")


def test_files_that_never_end(run: Path, tmp_path: Path) -> None:
    (actor(run) / "model" / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(actor(run) / "model" / "generation_config.json")
    with pytest.raises(ConfigError, match=r"generation_config.json is not a regular file"):
        export(sealed(run), tmp_path / "out")
    (actor(run) / "model" / "generation_config.json").unlink()
    complete = checkpoint_dir(run / "checkpoints", 1) / COMPLETE
    complete.unlink()
    complete.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"complete\.json is a symbolic link"):
        export(run, tmp_path / "out")


def test_tensors_larger_than_their_files(run: Path, tmp_path: Path) -> None:
    index = actor(run) / "tensors" / "index.json"
    name = "weights.model.norm.weight"
    edit(index, lambda i: i["tensors"][name].update(shape=[1 << 40]))
    with pytest.raises(DistflowError, match=r"has another part of 'weights.model.norm.weight' than the index says"):
        export(sealed(run), tmp_path / "out")


def test_a_base_model_whose_index_names_other_files(source: Source, tmp_path: Path) -> None:
    for name in ("/dev/zero", "../secret", "/etc/passwd"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ConfigError, match="names a file that is not beside it"):
            Source("m", source.config, source.tokenizer, tmp_path).reader({"w": [1]})
