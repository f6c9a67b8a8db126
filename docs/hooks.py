"""Makes the site whole: the README is its first page, and files of the repository that pages link to are pages, too."""

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|\))([^)#\s]+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cff": "yaml", ".toml": "toml"}


def place(path: str) -> str:
    """Returns where a file of the repository is in the site's sources."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") else f"source/{path}.md"


def targets(text: str, path: str) -> set[str]:
    """Returns the files of the repository that a page links to; `path` is the page's own."""
    return {normpath(f"{Path(path).parent}/{link}") for link in _LINK.findall(text)}


def moved(text: str, path: str) -> str:
    """Returns the page with links that are valid at its place in the site."""
    here = str(Path(place(path)).parent)

    def link(found: re.Match[str]) -> str:
        return relpath(place(normpath(f"{Path(path).parent}/{found[1]}")), here)

    return _LINK.sub(link, text)


def source(path: str) -> str:
    """Returns a page that shows a file, or lists a folder."""
    if (ROOT / path).is_dir():
        names = sorted(p.name for p in (ROOT / path).iterdir() if p.name[0] not in "._")
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = _LANGUAGES.get(Path(path).suffix, "")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}````\n"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the README and, from it and from all pages on, what they link to outside of docs/."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    wanted, known = ["README.md"], {"README.md", *pages}
    for path in pages:
        wanted += targets((ROOT / path).read_text(), path) - known
    while wanted:
        path = wanted.pop()
        if path.startswith("docs/") or (path in known and path != "README.md"):
            continue
        known.add(path)
        text = (ROOT / path).read_text() if path.endswith(".md") else ""
        files.append(File.generated(config, place(path), content=moved(text, path) if text else source(path)))
        wanted += targets(text, path) - known
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page of docs/."""
    return markdown if page.file.generated_by else moved(markdown, f"docs/{page.file.src_uri}")
