"""One line of an examination: what was looked at, what was found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """What was found about one thing. Whatever is not well has a fix."""

    about: str
    says: str
    level: Literal["well", "advice", "trouble"] = "well"
    """Advice: it works, and could work better. Trouble: training will fail, or be wrong."""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level != "well" and not self.fix:
            raise ValueError(f"{self.about}: {self.says} has no fix")


def ok(about: str, says: str) -> CheckResult:
    return CheckResult(about, says)


def warning(about: str, says: str, fix: str) -> CheckResult:
    return CheckResult(about, says, "advice", fix)


def failure(about: str, says: str, fix: str) -> CheckResult:
    return CheckResult(about, says, "trouble", fix)
