"""Result of one check: the subject, what was found, and how to fix it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. Every result with another level than "well" has a fix."""

    subject: str
    message: str
    level: Literal["well", "advice", "trouble"] = "well"
    """Advice: training works, but could work better. Trouble: training fails or gives wrong results."""
    fix: str = ""


def ok(subject: str, message: str) -> CheckResult:
    return CheckResult(subject, message)


def warning(subject: str, message: str, fix: str) -> CheckResult:
    return CheckResult(subject, message, "advice", fix)


def failure(subject: str, message: str, fix: str) -> CheckResult:
    return CheckResult(subject, message, "trouble", fix)
