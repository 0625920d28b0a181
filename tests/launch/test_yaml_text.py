"""YAML that is written is read back as it was."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.launch.yaml_text import to_yaml

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=8) | st.sampled_from(
    ["yes", "Off", "null", "~", "1.5", "0x1f", "1e3", "2026-01-01", "a: b", "- a", "#", "--run", "-m", "--", "=", ""]
)
THINGS = st.recursive(
    st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(TEXT, THINGS, min_size=1, max_size=3), min_size=1, max_size=2))
def test_what_is_written_is_read_back(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


def test_it_reads_as_people_write_it() -> None:
    made = {
        "kind": "Job",
        "spec": {"command": ["python", "-m", "a b"], "nodes": 2, "on": True, "rest": [{"a": "1"}, []]},
    }
    assert to_yaml([made]) == (
        'kind: Job\nspec:\n  command:\n    - python\n    - -m\n    - "a b"\n  nodes: 2\n  "on": true\n'
        '  rest:\n    - a: "1"\n    - []\n'
    )
