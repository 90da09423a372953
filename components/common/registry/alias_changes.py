"""How aliases of a registered model change: decide, write it into the audit log, set them as the log says.

A decision is an entry of the log. It gets the place behind those that it was made on, or it is made again
(`AuditLog.append`). The aliases follow the log, whoever sets them: what a killed process left undone, and what was
changed without enginery, is put right by the next change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from components.common.registry.audit_log import AuditLog, Entry, now, who
from components.common.registry.model_registry import Registry
from components.common.registry.promotions import CHAMPION, AliasChange, ChampionComparison, Change, Kind


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
    """What a proposal is made on."""

    aliases: Mapping[str, str]  # version by alias, by the log
    entries: Sequence[Entry]  # the log

    @property
    def champion(self) -> str | None:
        """The champion's version."""
        return self.aliases.get(CHAMPION)


def explained(entries: Sequence[Entry], run_ids: Mapping[str, str]) -> dict[str, str]:
    """What the aliases must be, by the log.

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
        aliases = explained(entries, registry.run_ids(model))
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
            when=now(),
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
        aliases, wanted = registry.aliases(log.model), explained(entries, registry.run_ids(log.model))
        for alias in {alias for entry in entries for alias in entry.change.changes}:
            if aliases.get(alias) != wanted.get(alias):
                registry.set_alias(log.model, alias, wanted.get(alias))
        before, entries = entries, log.read()
        if len(before) == len(entries):
            return
        # Another change came meanwhile, and what was set here may be older than that.
