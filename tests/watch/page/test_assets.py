"""The page's files are in the package, belong together, and fit into one."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from phalanx.watch.page import assets

STATIC = Path(assets.__file__).parent / "static"
ROOT = Path(__file__).parents[3]


def scripts() -> dict[str, str]:
    return {name: (STATIC / f"{name}.js").read_text() for name in assets.MODULES}


def test_every_file_is_packaged_and_served() -> None:
    found = {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}
    assert found == assets.TYPES.keys() | {"page.html"}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "phalanx.watch.page"
    ]
    assert all(any(fnmatch(f"static/{name}", pattern) for pattern in patterns) for name in found)


def test_scripts_import_those_before_them_and_share_no_names() -> None:
    seen: list[str] = []
    names: list[str] = []
    for name, text in scripts().items():
        assert set(re.findall(r'from "\./(\w+)\.js"', text)) <= set(seen)
        seen.append(name)
        names += re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names)), "in a report they are one script"


def test_nothing_is_from_elsewhere_and_ours_stays_small() -> None:
    ours = {**scripts(), "page": assets.page(), "css": (STATIC / "page.css").read_text()}
    for name, text in ours.items():
        assert not re.search(r"https?://|@import|innerHTML|\beval\b|style=", text), name
    assert sum(text.count("\n") for text in scripts().values()) <= 1500


def test_all_in_one_carries_what_it_shows() -> None:
    told = {"run": {"name": "</script><script>alert(1)</script>"}, "text": "é \u2028"}
    text = assets.whole(told)
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert "\nimport " not in text
    assert "\nexport " not in text
    assert "alert(1)</script>" not in text
    carried = re.search(r'id="told">(.*?)</script>', text, re.DOTALL)
    assert carried is not None
    assert json.loads(carried[1]) == told
    assert (
        "MIT" in (STATIC / "uplot" / "LICENSE").read_text()
        or "Permission is hereby granted" in (STATIC / "uplot" / "LICENSE").read_text()
    )
