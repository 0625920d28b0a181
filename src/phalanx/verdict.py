"""The Verdict: what a tool concluded, for people, for programs, and as an exit code for scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from phalanx.redact import redact
from phalanx.words import printable, valid_json


@dataclass
class Verdict:
    """Holds or not, the evidence, and the next step to take."""

    holds: bool
    summary: str
    evidence: list[str] = field(default_factory=list)
    next: str = ""
    code: int | None = None
    """An exit code other than 0 (holds) or 1 (a finding): 2 wrong use, 3 the environment cannot do it."""

    @property
    def exit_code(self) -> int:
        return self.code if self.code is not None else int(not self.holds)

    def __str__(self) -> str:
        lines = [self.summary, *self.evidence]
        if self.next:
            lines.append(self.next)
        return printable(redact("\n".join(lines)))

    def to_json(self) -> str:
        """One JSON object with the exit code in place of ``code``."""
        evidence = [redact(line) for line in self.evidence]
        told = {"summary": redact(self.summary), "evidence": evidence, "next": redact(self.next)}
        return valid_json(asdict(self) | told | {"code": self.exit_code})
