"""Words that the command line does not know, answered with those that mean the same here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from phalanx.errors import WrongUse

VERBS = {
    "list": "runs", "ls": "runs", "ps": "runs", "info": "status", "show": "status", "log": "logs", "tail": "logs",
    "stop": "cancel", "kill": "cancel", "run": "train", "fit": "train", "start": "train", "launch": "train",
    "finetune": "train", "fine-tune": "train", "resume": "train --resume", "continue": "train --resume",
    "plan": "train TASK --dry-run", "eval": "evaluate", "validate": "evaluate", "test": "evaluate", "init": "new",
    "create": "new", "benchmark": "bench", "convert": "export", "merge": "export", "check": "verify",
    "diagnose": "why", "debug": "why", "monitor": "watch", "dashboard": "watch", "sweep": "tune", "help": "--help",
    "version": "--version",
}  # fmt: skip
"""What people look for, and what it is here."""


class Verbs(TyperGroup):
    """All verbs; a word for one that it has not is answered with that, or with the nearest by its letters."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0] if args else ""
        if word in VERBS and word not in self.commands:
            raise WrongUse(f"there is no verb {word!r} here. Use phalanx {VERBS[word]}")
        return super().resolve_command(ctx, args)


class TaskVerb(TyperCommand):
    """A verb that takes a task: an option that it does not have may be a setting of the task, or part of a layout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = [param.name for param in self.params if param.param_type_name == "argument"]
        if "task" in names:
            self._look(args, names.index("task"))
        return super().parse_args(ctx, args)

    def _look(self, args: Sequence[str], place: int) -> None:
        """Refuse an option that is not there, if it is clear what is meant. ``place``: of the task among the words."""
        options = [param for param in self.params if param.param_type_name == "option"]
        known = {"--help": True} | {n: bool(getattr(p, "is_flag", False)) for p in options for n in p.opts}
        words, unknown, rest = [], [], list(args)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            if not name.startswith("--"):
                words.append(f"{name}{equals}{value}")
                continue
            takes = not known[name] if name in known else rest[:1] != [] and not rest[0].startswith("--")
            if takes and not equals and rest:
                value = rest.pop(0)
            if name not in known and name != "--":
                unknown.append((name.removeprefix("--").replace("-", "_"), value))
        for name, value in unknown if len(words) > place else ():
            layout = "--layout" if "--layout" in known else "--layouts"
            if told := _meant(self.name or "", words[place], name, value, layout):
                option = f"--{name.replace('_', '-')}"
                raise WrongUse(f"{option} is no option of phalanx {self.name}, but {told}")


def _meant(verb: str, reference: str, name: str, value: str, layout: str) -> str:
    """What this option is here, and how to give it; "": that is not known, or the task cannot be asked."""
    from phalanx.references import RECIPES, find_task
    from phalanx.settings import given_as, task_fields

    try:
        kind = find_task(reference)
    except WrongUse:
        return ""
    if told := given_as(kind, name, value or "true", layout):
        return told
    others = [recipe for recipe in RECIPES if name in task_fields(find_task(recipe))]
    if not others or reference not in RECIPES:
        return ""
    what = f"a setting of the recipe{'s' * (len(others) > 1)} {', '.join(others)}, which {kind.__name__} does not have"
    return f"{what}: phalanx {verb} {others[0]} --set {name}={value or 'true'}"
