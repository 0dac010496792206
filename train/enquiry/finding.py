"""One line of the enquiry: a question, what was found, and the numbers behind it."""

from typing import Any, Literal, NamedTuple

Status = Literal["ok", "suspect", "cause", "not checked"]


class Finding(NamedTuple):
    """What was found.

    Attributes:
        status: "cause" explains what went wrong; "suspect" may.
        text: One sentence.
        evidence: Numbers, a line each.
        advice: What to try, for a cause or a suspicion.
        question: Filled in by the list of questions.
    """

    status: Status
    text: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    question: str = ""

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"evidence": list(self.evidence)}


def ok(text: str, *evidence: str) -> Finding:
    return Finding("ok", text, evidence)


def not_checked(text: str) -> Finding:
    return Finding("not checked", text)
