"""What is done about an incident: go on, stop, or go back to a good checkpoint and other data."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jaxamp
from train.config import Config
from train.distributed import is_writer
from train.exits import InputError
from train.incidents import Incident


class Response(NamedTuple):
    """What follows an incident; `why` where it is not what the settings ask for."""

    action: Literal["skip", "stop", "rollback"]
    to_step: int | None = None
    why: str = ""

    def __str__(self) -> str:
        words = {
            "skip": "training goes on",
            "stop": "training stops",
            "rollback": f"training goes back to step {self.to_step} and on with other data",
        }
        return words[self.action] + (f": {self.why}" if self.why else "")


class RollBack(Exception):
    """Training goes back: later checkpoints are set aside, and the log says where data go on."""


class Log:
    """The incidents of a run, in `incidents/log.jsonl`, which outlives a restart."""

    def __init__(self, workdir: Path):
        self._path = workdir / "incidents" / "log.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        try:
            self.entries = [_entry(line) for line in lines]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self._path}: damaged; move it away to forget them") from None

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["action"] == "rollback"]

    def add(self, incident: Incident, response: Response, policy: str, **more: Any) -> None:
        """One line, by the process that writes; all processes know it."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **incident._asdict(),
            **response._asdict(),
            "policy": policy,
            **more,
        }
        self.entries.append(entry)
        if is_writer():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = "".join(json.dumps(entry) + "\n" for entry in self.entries)
            rest = self._path.with_suffix(".tmp")
            rest.write_text(whole)
            rest.replace(self._path)

    def data_state(self, step: int) -> Any:
        """Where the data go on after checkpoint `step`, if training went back to it.

        Or to a later one, which turned out to be damaged.
        """
        last = self.rollbacks[-1] if self.rollbacks else {"to_step": -1}
        return last["data_state"] if last["to_step"] >= step else None

    def policy_in_force(self, policy: jaxamp.Policy) -> tuple[jaxamp.Policy, str | None]:
        """The fallback that a rollback brought in place of `policy`, and a line that says so."""
        for entry in reversed(self.rollbacks):
            if entry["policy_after"] != entry["policy"] == str(policy):
                line = f"policy {entry['policy_after']} since the incident at step {entry['step']}"
                return jaxamp.get_policy(entry["policy_after"]), line
        return policy, None


def _entry(line: str) -> dict[str, Any]:
    entry = json.loads(line)
    if entry["action"] == "rollback":
        for name in ("step", "to_step", "policy", "policy_after", "data_state"):
            entry[name]
    return entry


def response(incident: Incident, config: Config, checkpoints: Iterable[int], log: Log) -> Response:
    """What the settings ask for, if it can be done."""
    if config.on_incident == "rollback":
        to_step = max((step for step in checkpoints if step < incident.since), default=None)
        if len(log.rollbacks) >= config.max_rollbacks:
            return Response("stop", why=f"--max-rollbacks {config.max_rollbacks} are used up")
        if to_step is None:
            return Response("stop", why="there is no checkpoint from before")
        return Response("rollback", to_step)
    if config.on_incident == "stop":
        return Response("stop")
    if incident.kind == "skips":
        return Response("stop", why="it skips all there is")
    return Response("skip")
