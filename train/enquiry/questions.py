"""The enquiry: the order in which a careful engineer looks for what went wrong, and the verdict.

First what is cheap and certain (data, weights), then whether float32 fails as well, then what only
16 bits can do. The first line that names a cause is the verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from train.enquiry import any_precision, sixteen_bits
from train.enquiry.case import Case
from train.enquiry.evidence import Evidence
from train.enquiry.finding import Finding, not_checked


class Question(NamedTuple):
    """A line of the enquiry; what a cause in it makes `void` need not be asked any more."""

    text: str
    look: Callable[[Case, Evidence], Finding]
    void: str = ""


QUESTIONS = (
    Question("Are the data in order?", any_precision.data, "the batch is to blame"),
    Question("Are the weights in order?", any_precision.weights, "the state is to blame"),
    Question("Is float32 stable with the same settings?", any_precision.float32),
    Question("Is it only 16 bits?", sixteen_bits.only_16_bits),
    Question("Is it the loss scale?", sixteen_bits.scale),
    Question("Is it the learning rate?", any_precision.learning_rate),
    Question("Is it the order of clip and unscale?", sixteen_bits.order),
    Question("Is it one operation of the model?", sixteen_bits.one_operation),
)


def enquire(case: Case, evidence: Evidence) -> Iterator[Finding]:
    """The findings, one by one."""
    void = ""
    for question in QUESTIONS:
        found = not_checked(void) if void else question.look(case, evidence)
        if found.status == "cause":
            void = void or question.void
        yield found._replace(question=question.text)


def verdict(findings: Sequence[Finding]) -> Finding | None:
    """The first cause, else the first suspicion; None where nothing was found."""
    for status in ("cause", "suspect"):
        for found in findings:
            if found.status == status:
                return found
    return None
