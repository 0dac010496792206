"""Why a step went wrong: `python -m train.diagnose RUN`.

The step is run again in ways that tell causes apart, and a list of questions is gone through in the
order in which a careful engineer asks them. Nothing in the run is changed.
"""

import argparse
import difflib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxamp
from train.config import Config, ConfigError
from train.enquiry.bisect import Bisection, bisect
from train.enquiry.case import Case, CaseError, newest_incident, of_config, of_run
from train.enquiry.evidence import Evidence
from train.enquiry.finding import Finding, ok
from train.enquiry.questions import enquire, verdict
from train.enquiry.trial import counted
from train.exits import exit_code, leave
from train.parse import load_json, parse, parse_flags
from train.progress import note
from train.run import check_policy
from train.step import make_loss_fn, step_policy
from train.workdir import write_whole

PROG = "python -m train.diagnose"
ABOUT = """Say why a step went wrong: RUN is a directory of train.run, whose newest incident is
looked at, else the step after its newest checkpoint; or an incident itself. Without RUN: the first
step of a config. RUN comes first; all flags of train.run change its settings, and these:
--bisect: find the smallest set of scopes that must stay float32.
--target-error X: gradient error that --bisect is to reach where the step is finite, as a fraction
of the float32 gradient; default: half of what the policy has.
--report FILE.html: write a page. --json FILE: write the findings for tools."""


OWN_FLAGS = ("--bisect", "--target-error", "--report", "--json")


class Options(NamedTuple):
    """What is asked for beside a config."""

    run: Path | None
    bisect: bool
    target_error: float | None
    report: Path | None
    json: Path | None


class Diagnosed(NamedTuple):
    """All that was found.

    Attributes:
        case: What was looked at.
        findings: One for each question.
        diagnosis: Of `jaxamp.diagnose`; None where it was not needed.
        bisection: None where it was not asked for.
        seconds: What it took.
        step_seconds: What a training step takes; None where none was timed.
    """

    case: Case
    findings: list[Finding]
    diagnosis: jaxamp.Diagnosis | None
    bisection: Bisection | None
    seconds: float
    step_seconds: float | None

    @property
    def verdict(self) -> Finding:
        """The line that explains the step, or one that says that nothing was found."""
        return verdict(self.findings) or ok(
            "nothing found: data, weights and precision are in order"
        )

    @property
    def cost(self) -> str:
        took = f"{self.seconds:.0f} s"
        if self.step_seconds is None:
            return took
        return f"{took}; a training step takes {self.step_seconds:.2g} s"

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.case.source,
            "policy": str(self.case.policy),
            "step": self.case.step,
            "notes": list(self.case.notes),
            "verdict": self.verdict.to_dict(),
            "findings": [found.to_dict() for found in self.findings],
            "bisection": self.bisection and self.bisection._asdict(),
            "diagnosis": self.diagnosis and self.diagnosis.to_dict(),
            "seconds": self.seconds,
        }


def main(args: Sequence[str] | None = None) -> int:
    """Prints the findings; the exit code is 0 whatever they are, 2 for bad input."""
    given = sys.argv[1:] if args is None else list(args)
    return exit_code(lambda: _diagnose(given), "the files", "start again")


def _diagnose(args: Sequence[str]) -> int:
    options, rest = _options(args)
    case = _case_or_hint(options.run, rest)
    if options.bisect and not Evidence(case).has_16_bits:
        raise CaseError(
            f"--bisect: policy {case.policy} has no 16 bits; try --policy mixed_float16"
        )
    found = diagnosed(case, options.bisect, options.target_error)
    if options.report is not None:
        from train.reports.diagnosis_page import html  # matplotlib: for those who want a page

        write_whole(options.report, html(found, f"{PROG} {' '.join(args)}"))
    if options.json is not None:
        write_whole(options.json, json.dumps(found.to_dict(), indent=2))
    return 0


def diagnosed(case: Case, bisects: bool = False, target_error: float | None = None) -> Diagnosed:
    """Goes through the enquiry and prints each line as it is found."""
    before = time.perf_counter()
    print(f"diagnosis of {case.source}\nunder {case.policy}")
    for line in case.notes:
        print(f"note: {line}")
    evidence, findings = Evidence(case, note), []
    for found in enquire(case, evidence):
        findings.append(found)
        print("\n".join(_lines(len(findings), found)), flush=True)
    bisection = bisect(case, evidence, target_error) if bisects else None
    if bisection is not None:
        print(f"\nsmallest set that must stay float32\n{bisection}")
    seconds = time.perf_counter() - before
    # Where the first lines had the cause it was not run, and the page does without.
    diagnosis = evidence.__dict__.get("diagnosis")
    result = Diagnosed(case, findings, diagnosis, bisection, seconds, evidence.step_seconds)
    print(f"\n{result.verdict.status}: {result.verdict.text}")
    if result.verdict.advice:
        print(result.verdict.advice)
    print(f"cost: {result.cost}")
    return result


def _lines(number: int, found: Finding) -> list[str]:
    lines = [f"\n{number}. {found.question} [{found.status}]", f"   {found.text}"]
    lines += [f"     {line}" for line in found.evidence]
    return lines + ([f"   {found.advice}"] if found.advice else [])


def _options(args: Sequence[str]) -> tuple[Options, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--target-error", type=float)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    try:
        found, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    run = Path(rest.pop(0)) if rest and not rest[0].startswith("-") else None
    if found.target_error is not None and not 0 < found.target_error < float("inf"):
        raise ConfigError(f"--target-error {found.target_error:g} must be above 0, such as 0.01")
    if found.target_error is not None and not found.bisect:
        raise ConfigError("--target-error has no effect without --bisect")
    for flag, path in (("--report", found.report), ("--json", found.json)):
        if path is not None and path.exists():
            raise ConfigError(f"{flag} {path}: is there already; name another file")
    if found.report is not None and found.report == found.json:
        raise ConfigError(f"--json {found.json}: is the file of --report; name another one")
    return Options(run, found.bisect, found.target_error, found.report, found.json), rest


def _case_or_hint(run: Path | None, flags: Sequence[str]) -> Case:
    """`_case`; a flag that nobody knows may be one of this command, mistyped."""
    try:
        return _case(run, flags)
    except ConfigError as error:
        unknown = [flag for flag in flags if f"options: {flag}" in str(error)]
        near = difflib.get_close_matches("".join(unknown[:1]), OWN_FLAGS, n=1)
        raise ConfigError(f"{error}; did you mean {near[0]}?" if near else str(error)) from None


def _case(run: Path | None, flags: Sequence[str]) -> Case:
    """What the command line names."""
    if run is None:
        config = parse(flags, PROG, ABOUT)
        if config.workdir is not None:
            raise ConfigError(f"--workdir {config.workdir}: give the run as the first argument")
        config, policy = _resolved(config)
        case = of_config(config, policy)
    else:
        if any(flag == "--config" or flag.startswith("--config=") for flag in flags):
            raise ConfigError(f"give a run ({run}) or --config, not both")
        path = newest_incident(run)
        written = _settings(path)
        config, policy = _resolved(parse_flags(Config, flags, PROG, ABOUT, written))
        case = of_run(path, config, policy)
    loss_fn = make_loss_fn(case.config, case.graphdef)
    args = case.state.params, case.batch, case.key(), counted(case.batch)
    check_policy(step_policy(policy, case.config), loss_fn, args)
    return case


def _resolved(config: Config) -> tuple[Config, jaxamp.Policy]:
    """With the policy as it came to: "auto" may mean something else on another device."""
    policy = jaxamp.get_policy(config.policy)
    return config.model_copy(update={"policy": str(policy)}), policy


def _settings(path: Path) -> Config:
    if not path.is_dir():
        raise CaseError(f"{path}: no such run; give a directory that train.run wrote")
    file = path / "config.json"
    if not file.is_file():
        raise CaseError(f"{path}: no config.json, so it is no run of train.run")
    return load_json(file.read_text(encoding="utf-8"), str(file))


if __name__ == "__main__":
    leave(main())
