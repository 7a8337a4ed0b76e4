"""Result of one check: the subject, what was found, and how to fix it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. Every result with another level than "well" has a fix."""

    about: str
    says: str
    level: Literal["well", "advice", "trouble"] = "well"
    """Advice: training works, but could work better. Trouble: training fails or gives wrong results."""
    fix: str = ""


def ok(about: str, says: str) -> CheckResult:
    return CheckResult(about, says)


def warning(about: str, says: str, fix: str) -> CheckResult:
    return CheckResult(about, says, "advice", fix)


def failure(about: str, says: str, fix: str) -> CheckResult:
    return CheckResult(about, says, "trouble", fix)
