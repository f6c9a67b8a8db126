"""The files of the page: its own, and those of the chart library, from where that is installed."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from distflow.errors import ConfigError
from distflow.util.extras import how_to_install

OWN = Path(__file__).parent / "static"
VIEWS = ("overview.js", "plan.js", "timeline.js", "traffic.js", "curves.js", "samples.js", "tokens.js", "runs.js")
SCRIPTS = ("core.js", "charts.js", *VIEWS, "main.js")
STYLES = ("page.css",)
LIBRARY_SCRIPT, LIBRARY_STYLE = "uPlot.iife.js", "uPlot.min.css"
INSTALL = f"install what the page needs: {how_to_install('page')}"


@cache
def files() -> dict[str, bytes]:
    """Returns name → content of all that a page loads; there are no others."""
    folders = dict.fromkeys((*SCRIPTS, *STYLES), OWN) | dict.fromkeys((LIBRARY_SCRIPT, LIBRARY_STYLE), _library())
    content = {name: (folder / name).read_bytes() for name, folder in folders.items()}
    styles = "".join(f'<link rel="stylesheet" href="{name}">' for name in (LIBRARY_STYLE, *STYLES))
    scripts = "".join(f'<script src="{name}"></script>' for name in (LIBRARY_SCRIPT, *SCRIPTS))
    return content | {"index.html": page(styles, scripts).encode()}


def page(styles: str, scripts: str, meta: str = "") -> str:
    """Returns the page's HTML with these elements in it."""
    text = (OWN / "index.html").read_text(encoding="utf-8")
    return text.replace("<!-- styles -->", meta + styles).replace("<!-- scripts -->", scripts)


def _library() -> Path:
    """Returns the folder of uPlot, without importing the package that brings it."""
    spec = find_spec("uplot")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(place) / "static").is_dir():
            return folder
    raise ConfigError(f"the chart library uPlot is not installed; {INSTALL}")
