"""The files of the page, as the package has them; and all of them in one, for a report."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.words import valid_json

MODULES = ("words", "theme", "source", "charts", "heat", "spans", "memory", "links", "runs", "facts", "main")
"""Scripts of ours, each after those that it imports."""
_JS, _CSS = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
TYPES = {
    **{f"{name}.js": _JS for name in MODULES},
    "page.css": _CSS,
    "uplot/uPlot.iife.min.js": _JS,
    "uplot/uPlot.min.css": _CSS,
    "uplot/LICENSE": "text/plain; charset=utf-8",
}
"""Every file that is served, and as what."""


@cache
def read(name: str) -> bytes:
    return (files("phalanx.watch.page") / "static" / name).read_bytes()


def page() -> str:
    return read("page.html").decode()


def whole(data: Any) -> str:
    """The page with everything in it that it needs: styles, scripts and what it shows."""
    styles = "\n".join(read(name).decode() for name in ("uplot/uPlot.min.css", "page.css"))
    scripts = "\n".join(_alone(read(f"{name}.js").decode()) for name in MODULES)
    text = re.sub(r"^ *<(?:link rel=\"(?:stylesheet|modulepreload)\"|script ).*\n", "", page(), flags=re.MULTILINE)
    head = f"<style>\n{styles}</style>\n<script>\n{read('uplot/uPlot.iife.min.js').decode()}</script>\n"
    told = valid_json(data).replace("<", "\\u003c")  # no text in it may end the script
    tail = f'<script type="application/json" id="told">{told}</script>\n<script type="module">\n{scripts}</script>\n'
    return text.replace("</head>", head + "</head>").replace("</body>", tail + "</body>")


def _alone(script: str) -> str:
    """Without what it says of other files: in a report all of them are one."""
    script = re.sub(r"^import .*?;\n", "", script, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^export ", "", script, flags=re.MULTILINE)
