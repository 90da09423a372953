"""The audit log of a registered model: a chain of MLflow runs that only ever grows, at one end.

MLflow has no compare-and-set, but a parameter of a run is written once: a second value is refused, by SQLite,
PostgreSQL and a server alike. So each entry of the log is a run that holds what was decided in the parameter `change`,
what became of it in `outcome`, and the run of the entry that follows in `next`. Who wants to add an entry writes `next`
of the last one: of several, one succeeds, and the others read the log again, which their decision must fit.

The first link hangs on the experiment "audit of NAME", which gets that name, unique in MLflow, when it is complete.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from components.common.digests import canonical_json, digest_json
from components.common.errors import EngineryError, UserError
from components.common.holder import is_gone
from components.common.promotions import CHAMPION, Change, Holder, Outcome
from components.common.registry import patiently
from components.common.store import beside_database

_GENESIS = "enginery.first_entry"  # tag of the experiment: the run whose `next` is the first entry
_HOLDER = "enginery.holder"  # tag of an entry's run
_CHANGE, _OUTCOME, _NEXT = "change", "outcome", "next"
_MAX_LENGTH = 6000  # of a parameter in MLflow, which cuts what is longer
_STATUS = {"done": "FINISHED", "partly done": "FAILED", "not done": "FAILED"}


def now() -> str:
    """UTC, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(when: str) -> float:
    """How long ago a time of a record is."""
    return (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds()


def experiment_name(model: str) -> str:
    """Where the log of a model is in MLflow."""
    return f"audit of {model}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One change in the log; `outcome` is None while it is being made."""

    run_id: str
    number: int  # from 1
    change: Change
    outcome: Outcome | None
    next_id: str

    @property
    def digest(self) -> str:
        """Of what the entry says, by which the next one holds it."""
        said = {"change": self.change.model_dump(mode="json")}
        return digest_json({**said, "outcome": self.outcome.model_dump(mode="json") if self.outcome else None})


class Ledger:
    """The audit log of one registered model."""

    def __init__(self, client: MlflowClient, model: str) -> None:
        self.client = client
        self.model = model
        self._experiment_id = ""
        self._genesis = ""
        self._strays: list[Run] = []  # begun, and in the log of the last `read` not yet or never

    def read(self) -> list[Entry]:
        """All entries in their order; none where the log has not begun.

        Raises:
            EngineryError: an entry is missing in the middle or can't be read.
        """
        if not self._find():
            return []
        runs = self._runs()
        entries: list[Entry] = []
        following = self._next_of(runs, self._genesis)
        while following:
            if following not in runs:
                runs = self._runs()  # it was added while the pages were read
            entry = self._entry(runs, following, len(entries) + 1)
            entries.append(entry)
            following = entry.next_id
        linked = {self._genesis, *(entry.run_id for entry in entries)}
        self._strays = [run for run in runs.values() if run.info.status == "RUNNING" and run.info.run_id not in linked]
        return entries

    def append(self, change: Change, last: Entry | None) -> Entry | None:
        """Add an entry behind the last one that is known.

        Returns:
            The entry; None where another one came first, so that the log must be read again.

        Raises:
            EngineryError: the log was deleted in MLflow.
        """
        if not self._find():
            self._begin()
        text = _to_json(change)
        self._tidy()
        tags = {**_shown(change), "mlflow.user": change.holder.user, "mlflow.source.name": "enginery"}
        tags[_HOLDER] = change.holder.model_dump_json()
        run = patiently(lambda: self.client.create_run(self._experiment_id, run_name=_title(change), tags=tags))
        run_id = str(run.info.run_id)
        self._write_once(run_id, _CHANGE, text)
        if self._write_once(last.run_id if last else self._genesis, _NEXT, run_id) != run_id:
            self._show_end(run_id, "not in the log: another change came first", "KILLED")
            return None
        number = last.number + 1 if last else 1
        return Entry(run_id=run_id, number=number, change=change, outcome=None, next_id="")

    def outcome_of(self, entry: Entry) -> Outcome | None:
        """What became of an entry by now."""
        params = patiently(lambda: self.client.get_run(entry.run_id)).data.params
        return Outcome.model_validate_json(params[_OUTCOME]) if _OUTCOME in params else None

    def close(self, entry: Entry, outcome: Outcome) -> Outcome:
        """Say what became of an entry.

        Returns:
            What counts: another process may have said so first.
        """
        counts = Outcome.model_validate_json(self._write_once(entry.run_id, _OUTCOME, _to_json(outcome)))
        self._show_end(entry.run_id, counts.status, _STATUS[counts.status])
        return counts

    def _tidy(self) -> None:
        """End the runs of processes that were killed before their entry was in the log."""
        for run in self._strays:
            text = run.data.tags.get(_HOLDER, "")
            if text and is_gone(Holder.model_validate_json(text)):
                self._show_end(run.info.run_id, "not in the log: its process was killed", "KILLED")
        self._strays = []

    def _show_end(self, run_id: str, outcome: str, status: str) -> None:
        """For people who look at the runs; what counts is in the parameters."""
        patiently(lambda: self.client.set_tag(run_id, "outcome", outcome))
        patiently(lambda: self.client.set_terminated(run_id, status=status))

    def _write_once(self, run_id: str, key: str, value: str) -> str:
        """Write a parameter that has no value yet. Returns the value that it has now, ours or an earlier one."""
        try:
            patiently(lambda: self.client.log_param(run_id, key, value))
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            run = patiently(lambda: self.client.get_run(run_id))
            if key not in run.data.params:
                if run.info.lifecycle_stage != "active":
                    raise UserError(
                        f"a run of the audit log of {self.model} was deleted in MLflow. Put it back: "
                        f"mlflow runs restore --run-id {run_id}"
                    ) from error
                raise self._damaged(f"its run {run_id} takes no more entries") from error
            return str(run.data.params[key])
        return value

    def _find(self) -> bool:
        if self._genesis:
            return True
        found = patiently(lambda: self.client.get_experiment_by_name(experiment_name(self.model)))
        if found is None:
            return False
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the audit log of {self.model} was deleted in MLflow. Put it back: "
                f"mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        if _GENESIS not in found.tags:
            raise self._damaged(f"the experiment {found.name!r} has lost its tag {_GENESIS}")
        self._experiment_id, self._genesis = str(found.experiment_id), found.tags[_GENESIS]
        return True

    def _begin(self) -> None:
        """Make the experiment with its first run, then give it its name. Of several at once, one gets the name."""
        root = beside_database(str(self.client.tracking_uri))
        tags = {"mlflow.experimentKind": "custom_model_development", "enginery.audit_of": self.model}
        note = f"Every change of the aliases of the registered model {self.model}: `enginery audit {self.model}`."
        own = f"{experiment_name(self.model)}, being made {uuid.uuid4().hex}"
        experiment_id = patiently(
            lambda: self.client.create_experiment(
                own, artifact_location=root, tags={**tags, "mlflow.note.content": note}
            )
        )
        run = patiently(lambda: self.client.create_run(experiment_id, run_name="the log begins"))
        patiently(lambda: self.client.set_terminated(run.info.run_id))
        patiently(lambda: self.client.set_experiment_tag(experiment_id, _GENESIS, run.info.run_id))
        try:
            patiently(lambda: self.client.rename_experiment(experiment_id, experiment_name(self.model)))
        except MlflowException:
            if not self._find():  # nobody else took the name, so something else is wrong
                raise
            patiently(lambda: self.client.delete_experiment(experiment_id))
            return
        self._find()

    def _runs(self) -> dict[str, Run]:
        """Every run of the experiment, deleted ones too: those are not gone yet."""
        found: dict[str, Run] = {}
        token: str | None = None
        while True:
            search = partial(
                self.client.search_runs, [self._experiment_id], run_view_type=ViewType.ALL, max_results=1000
            )
            page = patiently(partial(search, page_token=token))
            found.update({run.info.run_id: run for run in page})
            token = page.token
            if not token:
                return found

    def _next_of(self, runs: dict[str, Run], run_id: str) -> str:
        if run_id not in runs:
            raise self._damaged(f"the run {run_id} is gone from the experiment {experiment_name(self.model)!r}")
        return str(runs[run_id].data.params.get(_NEXT, ""))

    def _entry(self, runs: dict[str, Run], run_id: str, number: int) -> Entry:
        following = self._next_of(runs, run_id)
        params = runs[run_id].data.params
        try:
            change = Change.model_validate_json(params[_CHANGE])
            outcome = Outcome.model_validate_json(params[_OUTCOME]) if _OUTCOME in params else None
        except (KeyError, ValidationError) as error:
            raise self._damaged(f"entry {number} (run {run_id}) can't be read: {error}") from error
        return Entry(run_id=run_id, number=number, change=change, outcome=outcome, next_id=following)

    def _damaged(self, problem: str) -> EngineryError:
        return EngineryError(
            f"the audit log of {self.model} is damaged: {problem}. Restore MLflow's database from a backup, or begin a "
            f"new log: rename the experiment {experiment_name(self.model)!r} in MLflow"
        )


def chain_problems(entries: Sequence[Entry]) -> list[str]:
    """Where entries do not hold each other: somebody changed MLflow's database."""
    problems = []
    for before, entry in zip([None, *entries], entries, strict=False):
        expected = (before.run_id, before.digest) if before else ("", "")
        if (entry.change.previous, entry.change.previous_digest) != expected:
            problems.append(f"entry {entry.number} does not follow on what entry {entry.number - 1} says now")
    return problems


def _title(change: Change) -> str:
    """Name of the run, the champion first."""
    order = sorted(change.changes.items(), key=lambda entry: (entry[0] != CHAMPION, entry[0]))
    return f"{change.kind}: " + ", ".join(
        f"@{alias} {entry.before or 'none'} -> {entry.after or 'none'}" for alias, entry in order
    )


def _shown(change: Change) -> dict[str, str]:
    """Columns of the table of runs in MLflow."""
    tags = {f"to.{alias}": entry.after or "none" for alias, entry in change.changes.items()}
    tags |= {f"from.{alias}": entry.before or "none" for alias, entry in change.changes.items()}
    tags |= {"model": change.model, "why": change.why, "forced": str(change.forced).lower()}
    if change.comparison is not None:
        tags["comparison"] = change.comparison.text
    return {**tags, "mlflow.note.content": change.why}


def _to_json(record: Change | Outcome) -> str:
    text = canonical_json(record.model_dump(mode="json")).decode()
    if len(text) > _MAX_LENGTH:
        raise UserError(f"a record of {len(text)} characters does not fit into MLflow's {_MAX_LENGTH}: shorten --why")
    return text


def entry_json(entry: Entry) -> dict[str, object]:
    """An entry as programs read it."""
    outcome = entry.outcome.model_dump(mode="json") if entry.outcome else None
    told: dict[str, object] = json.loads(entry.change.model_dump_json())
    return {"number": entry.number, "mlflow_run_id": entry.run_id, **told, "outcome": outcome}
