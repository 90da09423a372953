"""The audit log of a registered model, and how its aliases change by it.

The log is one run of MLflow, of which each parameter is an entry. A decision is an entry. It gets the place behind
those that it was made on, or it is made again (`AuditLog.append`). The aliases follow the log, whoever sets them: what
a killed process left undone, and what was changed without enginery, is put right by the next change.
"""

import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from components.common.contracts.digests import canonical_json
from components.common.contracts.environment import utc_now
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import first_problem
from components.common.registry.model_registry import Registry, patiently
from components.common.registry.promotions import CHAMPION, AliasChange, ChampionComparison, Change, Kind
from components.common.registry.store import beside_database
from components.common.registry.tracking import user_name

_ROOT = "enginery.first_entry"  # tag of the experiment: the run that holds the entries
_MAX_LENGTH = 6000  # of a parameter in MLflow, which cuts what is longer


def who() -> str:
    """The person and the machine that change something."""
    return f"{user_name()}@{socket.gethostname()}"


def experiment_name(model: str) -> str:
    """Return the name of the experiment in MLflow that holds the log of a model."""
    return f"audit of {model}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One change in the log."""

    run_id: str  # of the log
    number: int  # from 1
    change: Change


class AuditLog:
    """The audit log of one registered model."""

    def __init__(self, client: MlflowClient, model: str) -> None:
        self.client = client
        self.model = model
        self._root = ""

    def read(self) -> list[Entry]:
        """All entries in their order; none where the log has not begun.

        Raises:
            UserError: the log was deleted in MLflow.
            EngineryError: an entry is missing in the middle or can't be read.
        """
        if not self._find():
            return []
        params = patiently(lambda: self.client.get_run(self._root)).data.params
        keys = sorted(params, key=lambda key: (len(key), key))
        if keys != [_key(number) for number in range(1, len(keys) + 1)]:
            raise self._damaged(f"its run {self._root} holds {', '.join(keys[:20])}")
        try:
            changes = [Change.model_validate_json(params[key]) for key in keys]
        except ValidationError as error:
            raise self._damaged(f"an entry of its run {self._root} can't be read: {first_problem(error)}") from error
        return [Entry(run_id=self._root, number=at, change=change) for at, change in enumerate(changes, 1)]

    def append(self, change: Change, number: int) -> Entry | None:
        """Add an entry as the one of this number.

        Returns:
            The entry; None where another one came first, so that the log must be read again.

        Raises:
            UserError: the log was deleted in MLflow, or the entry is too long.
        """
        text = canonical_json(change.model_dump(mode="json")).decode()
        if len(text) > _MAX_LENGTH:
            message = f"a record of {len(text)} characters does not fit into MLflow's {_MAX_LENGTH}: shorten --why"
            raise UserError(message, code="record-too-long", setting="--why")
        if not self._find():
            self._begin()
        try:
            patiently(lambda: self.client.log_param(self._root, _key(number), text))
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            run = patiently(lambda: self.client.get_run(self._root))
            if run.info.lifecycle_stage != "active":
                raise UserError(
                    f"the audit log of {self.model} was deleted in MLflow. Put it back: mlflow runs restore --run-id "
                    f"{self._root}",
                    code="log-deleted",
                ) from error
            if run.data.params.get(_key(number)) != text:
                return None
        return Entry(run_id=self._root, number=number, change=change)

    def _find(self) -> bool:
        if self._root:
            return True
        found = patiently(lambda: self.client.get_experiment_by_name(experiment_name(self.model)))
        if found is None:
            return False
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the audit log of {self.model} was deleted in MLflow. Put it back: "
                f"mlflow experiments restore --experiment-id {found.experiment_id}",
                code="log-deleted",
            )
        if _ROOT not in found.tags:
            raise self._damaged(f"the experiment {found.name!r} has lost its tag {_ROOT}")
        self._root = found.tags[_ROOT]
        return True

    def _begin(self) -> None:
        """Make the experiment with its run, then give it its name. Of several at once, one gets the name."""
        tags = {
            "mlflow.experimentKind": "custom_model_development",
            "enginery.audit_of": self.model,
            "mlflow.note.content": f"Every change of the aliases of {self.model}: `enginery audit {self.model}`.",
        }
        own = f"{experiment_name(self.model)}, being made {uuid.uuid4().hex}"
        place = beside_database(str(self.client.tracking_uri))
        experiment_id = patiently(lambda: self.client.create_experiment(own, artifact_location=place, tags=tags))
        run = patiently(lambda: self.client.create_run(experiment_id, run_name=experiment_name(self.model)))
        patiently(lambda: self.client.set_terminated(run.info.run_id))
        patiently(lambda: self.client.set_experiment_tag(experiment_id, _ROOT, run.info.run_id))
        try:
            patiently(lambda: self.client.rename_experiment(experiment_id, experiment_name(self.model)))
        except MlflowException:
            if not self._find():  # nobody else took the name, so something else is wrong
                raise
            patiently(lambda: self.client.delete_experiment(experiment_id))
        self._find()

    def _damaged(self, problem: str) -> EngineryError:
        return EngineryError(
            f"the audit log of {self.model} is damaged, or an enginery before version 0.2 wrote it: {problem}. Restore "
            f"MLflow's database from a backup, or begin a new log: rename the experiment "
            f"{experiment_name(self.model)!r} in MLflow, and promote again what is to be served",
            code="log-damaged",
        )


def _key(number: int) -> str:
    return f"{number:04d}"


def entry_json(entry: Entry) -> dict[str, object]:
    """An entry as programs read it."""
    return {"number": entry.number, "mlflow_run_id": entry.run_id, **entry.change.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Aliases that are to change, and why."""

    kind: Kind
    aliases: Mapping[str, str]  # version by alias
    why: str
    forced: bool = False
    overruled: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    comparison: ChampionComparison | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Aliases and log that a proposal is made on."""

    aliases: Mapping[str, str]  # version by alias, by the log
    entries: Sequence[Entry]  # the log

    @property
    def champion(self) -> str | None:
        """The champion's version."""
        return self.aliases.get(CHAMPION)


def expected_aliases(entries: Sequence[Entry], run_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the aliases as the log has them.

    A version that was deleted took its aliases with it. So did all of a model that was deleted: when it is made again,
    its versions count from 1, too, and come from other runs (`run_ids`, see `Registry.run_ids`).
    """
    aliases: dict[str, str] = {}
    promoted: dict[str, str] = {}
    for entry in entries:
        new = {alias: change.after for alias, change in entry.change.changes.items()}
        aliases |= new
        if entry.change.kind == "promote" and entry.change.run_id:
            promoted |= dict.fromkeys(new.values(), entry.change.run_id)
    there = {number for number, run_id in run_ids.items() if promoted.get(number, run_id) == run_id}
    return {alias: number for alias, number in aliases.items() if number in there}


def champions(entries: Sequence[Entry]) -> list[str]:
    """The champions that a rollback can go back through, the present one last.

    A rollback takes off what it went back over, so that the next one goes further.
    """
    stack: list[str] = []
    for entry in entries:
        change = entry.change.changes.get(CHAMPION)
        if change is None or stack[-1:] == [change.after]:
            continue
        if entry.change.kind == "rollback" and change.after in stack:
            del stack[len(stack) - stack[::-1].index(change.after) :]
        else:
            stack.append(change.after)
    return stack


def change_aliases(
    registry: Registry, model: str, propose: Callable[[Situation], Proposal], *, run_id: str = ""
) -> Entry:
    """Change aliases by a proposal that held when it was written into the log.

    Args:
        registry: of the model.
        model: its name.
        propose: called with the situation, and again whenever another change came first. What it raises ends all.
        run_id: MLflow run that asks for it; empty for a person at a terminal.

    Returns:
        The entry.
    """
    log = AuditLog(registry.client, model)
    follow(registry, log)
    while True:
        entries = log.read()
        aliases = expected_aliases(entries, registry.run_ids(model))
        proposal = propose(Situation(aliases=aliases, entries=entries))
        change = Change(
            model=model,
            kind=proposal.kind,
            changes={
                alias: AliasChange(before=aliases.get(alias), after=number)
                for alias, number in proposal.aliases.items()
            },
            why=proposal.why,
            forced=proposal.forced,
            overruled=proposal.overruled,
            when=utc_now(),
            who=who(),
            run_id=run_id,
            digests=dict(proposal.digests),
            comparison=proposal.comparison,
        )
        entry = log.append(change, len(entries) + 1)
        if entry is not None:
            follow(registry, log)
            return entry


def follow(registry: Registry, log: AuditLog) -> None:
    """Set the aliases that the log names as it says. Aliases that it never named are left alone."""
    entries = log.read()
    while entries:
        aliases, wanted = registry.aliases(log.model), expected_aliases(entries, registry.run_ids(log.model))
        for alias in {alias for entry in entries for alias in entry.change.changes}:
            if aliases.get(alias) != wanted.get(alias):
                registry.set_alias(log.model, alias, wanted.get(alias))
        before, entries = entries, log.read()
        if len(before) == len(entries):
            return
        # Another change came meanwhile, and what was set here may be older than that.
