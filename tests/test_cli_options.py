"""Options of ``phalanx train``: each says what it is for, and is one that the command takes."""

from __future__ import annotations

from inspect import signature
from typing import get_args

from phalanx import cli, cli_options


def test_each_option_has_a_help_and_is_taken() -> None:
    defined = {name: get_args(kind) for name, kind in vars(cli_options).items() if len(get_args(kind)) == 2}
    taken = {name: f"option.{name.title().replace('_', '')}" for name in signature(cli.train).parameters}
    assert {f"option.{name}" for name in defined} == set(taken.values())
    for name, (_, described) in defined.items():
        assert described.help, name
