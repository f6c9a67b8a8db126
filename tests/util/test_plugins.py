import sys
from pathlib import Path

import pytest

from distflow.errors import ConfigError
from distflow.util.plugins import load_plugin, load_plugins, package_of


def install(folder: Path, package: str, entries: str, group: str = "toy.group") -> None:
    """Makes a distribution with entry points, as pip would leave it in a folder."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_built_in_and_installed_plugins_are_in_one_table(site: Path) -> None:
    install(site, "toy-things", "ours = json:loads")
    found = load_plugins("toy.group", {"theirs": "json:dumps"})
    assert {name: package_of(entry) for name, entry in found.items()} == {"theirs": "distflow", "ours": "toy-things"}
    assert load_plugin(found, "ours", "x")("3") == 3
    assert load_plugin(found, "theirs", "x")(3) == "3"


def test_nothing_is_imported_until_it_is_asked_for(site: Path) -> None:
    (site / "toy_unused.py").write_text("raise SystemExit('imported')")
    install(site, "toy-things", "ours = toy_unused:x")
    assert set(load_plugins("toy.group")) == {"ours"}
    assert "toy_unused" not in sys.modules


@pytest.mark.parametrize("built_in", [{"ours": "json:dumps"}, {}])
def test_two_packages_with_the_same_name_are_refused(site: Path, built_in: dict[str, str]) -> None:
    install(site, "toy-one", "ours = json:loads")
    install(site, "toy-two", "ours = json:load")
    with pytest.raises(ConfigError, match=r"packages .* both bring 'ours'"):
        load_plugins("toy.group", built_in)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("import no_such_thing", "ModuleNotFoundError"), ("raise SystemExit(3)", "SystemExit: 3"), ("", "AttributeError")],
)
def test_a_plugin_that_does_not_import_names_its_package(site: Path, content: str, reason: str) -> None:
    (site / "toy_broken.py").write_text(content)
    sys.modules.pop("toy_broken", None)
    install(site, "toy-things", "ours = toy_broken:x")
    with pytest.raises(ConfigError, match=rf"roles.x: 'ours' of the package toy-things \(toy_broken:x\).*{reason}"):
        load_plugin(load_plugins("toy.group"), "ours", "roles.x")


def test_an_unknown_name_suggests_one(site: Path) -> None:
    install(site, "toy-things", "scorer = json:loads")
    with pytest.raises(ConfigError, match=r"roles.x: nothing installed is called 'scorr'.*scorer"):
        load_plugin(load_plugins("toy.group"), "scorr", "roles.x")
