"""How aliases of a registered model change: decide, write it into the audit log, set them, write what became of it.

The log is the lock. An entry can only be added behind the last one, and only once that one has its outcome; the place
behind it goes to one process of several (`Ledger.append`). So a decision is made against the champion that it
replaces, or it is made again. A process that dies between its entry and its outcome holds the others up until they see
that it is gone, or for LEASE_S seconds where they can't see that; then one of them writes what the aliases show.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from components.common.errors import EngineryError
from components.common.holder import is_gone, this_process
from components.common.ledger import Entry, Ledger, now, seconds_since
from components.common.promotions import CHAMPION, AliasChange, ChampionComparison, Change, Holder, Kind, Outcome
from components.common.registry import Registry
from components.common.tracking import is_unreachable

LEASE_S = 60.0  # how long a change may take, by the clock of who waits for it
_OWN_SHARE = 0.5  # of it, after which who makes the change sets no alias any more
_LATE_S = 600.0  # how long after it was given up a change may still come: a process that was stopped, a slow request
_MOST_UNDONE = 5  # entries of one call that came to nothing, before it gives up
_POLL_S = 0.2
_PATIENCE_S = 2.0  # then it is said what is waited for


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Aliases that are to change, and why."""

    kind: Kind
    aliases: Mapping[str, str | None]  # version by alias, None to remove it
    why: str
    forced: bool = False
    overruled: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    comparison: ChampionComparison | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a proposal is made on."""

    aliases: Mapping[str, str]  # version by alias, now
    entries: Sequence[Entry]  # the log; each has its outcome

    @property
    def champion(self) -> str | None:
        """The champion's version."""
        return self.aliases.get(CHAMPION)


def explained(entries: Sequence[Entry]) -> dict[str, str]:
    """What the aliases must be, by the log."""
    aliases: dict[str, str] = {}
    for entry in entries:
        for alias, number in (entry.outcome.aliases if entry.outcome else {}).items():
            if number is None:
                aliases.pop(alias, None)
            else:
                aliases[alias] = number
    return aliases


def champions(entries: Sequence[Entry]) -> list[str]:
    """The champions that a rollback can go back through, the present one last.

    A rollback takes off what it went back over, so that the next one goes further.
    """
    stack: list[str] = []
    for entry in entries:
        number = entry.outcome.aliases.get(CHAMPION) if entry.outcome else None
        if number is None or (stack and stack[-1] == number):
            continue
        if entry.change.kind in ("rollback", "repair") and number in stack:
            del stack[len(stack) - stack[::-1].index(number) :]
        else:
            stack.append(number)
    return stack


def change_aliases(
    registry: Registry,
    model: str,
    propose: Callable[[Situation], Proposal],
    *,
    run_id: str = "",
    say: Callable[[str], None] = lambda text: None,
    lease_s: float = LEASE_S,
) -> Entry:
    """Change aliases by a proposal that held when it was written into the log.

    Args:
        registry: of the model.
        model: its name.
        propose: called with the situation, and again whenever another change came first. What it raises ends all.
        run_id: MLflow run that asks for it; empty for a person at a terminal.
        say: told what is waited for.
        lease_s: see LEASE_S.

    Returns:
        The entry, with its outcome.
    """
    return _Changer(registry, Ledger(registry.client, model), run_id, say, lease_s).run(propose)


class _Changer:
    def __init__(
        self, registry: Registry, ledger: Ledger, run_id: str, say: Callable[[str], None], lease_s: float
    ) -> None:
        self.registry, self.ledger, self.run_id = registry, ledger, run_id
        self.say, self.lease_s = say, lease_s
        self.holder = this_process()
        self._num_undone = 0

    def run(self, propose: Callable[[Situation], Proposal]) -> Entry:
        while True:
            entries = self.ledger.read()
            if entries and entries[-1].outcome is None:
                self._await(entries[-1])
                continue
            aliases = self.registry.aliases(self.ledger.model)
            if differing := _differing(aliases, explained(entries)):
                self._account_for(differing, aliases, entries)
                continue
            made = self._make(propose(Situation(aliases=aliases, entries=entries)), aliases, entries)
            if made is not None:
                return made

    def _account_for(self, differing: set[str], aliases: Mapping[str, str], entries: Sequence[Entry]) -> None:
        """Write down what was changed without the log. What a change set after it had been given up is undone."""
        should = explained(entries)
        late = {alias for alias in differing if _is_late(alias, aliases.get(alias), entries)}
        if late:
            why = "set after the change had been given up, and another one had come first"
            undone = {alias: should.get(alias) for alias in late}
            self._make(Proposal(kind="repair", aliases=undone, why=why), aliases, entries)
            return
        why = "found when the log began" if not entries else "changed without enginery, such as in MLflow's UI"
        found = {alias: aliases.get(alias) for alias in differing}
        self._make(Proposal(kind="outside", aliases=found, why=why), should, entries)

    def _make(self, proposal: Proposal, aliases: Mapping[str, str], entries: Sequence[Entry]) -> Entry | None:
        """Put a proposal into the log and carry it out. None where something else came first."""
        last = entries[-1] if entries else None
        change = Change(
            model=self.ledger.model,
            kind=proposal.kind,
            changes={
                alias: AliasChange(before=aliases.get(alias), after=number)
                for alias, number in proposal.aliases.items()
            },
            why=proposal.why,
            forced=proposal.forced,
            overruled=proposal.overruled,
            when=now(),
            holder=self.holder,
            run_id=self.run_id,
            digests=dict(proposal.digests),
            comparison=proposal.comparison,
            previous=last.run_id if last else "",
            previous_digest=last.digest if last else "",
        )
        started = time.monotonic()
        entry = self.ledger.append(change, last)
        if entry is None:
            return None
        try:
            outcome = self._carry_out(entry, started)
        except BaseException:
            self._leave(entry)
            raise
        if outcome.status == "done":
            return Entry(run_id=entry.run_id, number=entry.number, change=change, outcome=outcome, next_id="")
        self._num_undone += 1
        if self._num_undone == _MOST_UNDONE:
            raise EngineryError(
                f"the aliases of {self.ledger.model} are not changed: {_MOST_UNDONE} tries came to nothing, since "
                f"something else set them at the same time, or the server is too slow. `enginery audit "
                f"{self.ledger.model}` names the tries; find what else sets the aliases, then run this again"
            )
        return None

    def _carry_out(self, entry: Entry, started: float) -> Outcome:
        if entry.change.kind != "outside":  # which is done already
            for alias, change in entry.change.changes.items():
                outcome = self.ledger.outcome_of(entry)
                if outcome is not None:
                    return outcome  # somebody waited long enough and closed the entry
                if time.monotonic() - started > _OWN_SHARE * self.lease_s:
                    return self._settle(entry, "its own process, too late")
                self.registry.set_alias(self.ledger.model, alias, change.after)
        return self.ledger.close(entry, self._seen(entry, ""))

    def _seen(self, entry: Entry, settled_by: str) -> Outcome:
        """What the aliases show of an entry."""
        aliases = self.registry.aliases(self.ledger.model)
        changes = entry.change.changes
        reached = [alias for alias, change in changes.items() if aliases.get(alias) == change.after]
        status = "done" if len(reached) == len(changes) else "partly done" if reached else "not done"
        found = {alias: aliases.get(alias) for alias in changes}
        return Outcome(status=status, aliases=found, when=now(), settled_by=settled_by)

    def _settle(self, entry: Entry, by: str) -> Outcome:
        return self.ledger.close(entry, self._seen(entry, by))

    def _leave(self, entry: Entry) -> None:
        """Interrupted or failed in the middle: say so, that nobody need wait. Without a server others find out."""
        try:
            self._settle(entry, "its own process, interrupted")
        except Exception as error:
            if not is_unreachable(error) and not isinstance(error, EngineryError):
                raise

    def _await(self, entry: Entry) -> None:
        """Wait for the end of somebody's change, then close it where that process is gone or too slow."""
        started = time.monotonic()
        holder = entry.change.holder
        told = False
        while self.ledger.outcome_of(entry) is None:
            waited_s = time.monotonic() - started
            if is_gone(holder) or waited_s > self.lease_s:
                self._settle(entry, f"{self.holder.user}@{self.holder.host}")
                return
            if waited_s > _PATIENCE_S and not told:
                told = True
                self.say(_waiting(entry, holder, self.lease_s))
            time.sleep(_POLL_S)


def _waiting(entry: Entry, holder: Holder, lease_s: float) -> str:
    return (
        f"{holder.user}@{holder.host} (process {holder.pid}) is changing {entry.change.model}; waiting for it, "
        f"{lease_s:.0f} s at most"
    )


def _is_late(alias: str, number: str | None, entries: Sequence[Entry]) -> bool:
    """Whether an alias shows what a change wanted that was given up a short time ago, so that it came after all."""
    for entry in entries[::-1]:
        change, outcome = entry.change.changes.get(alias), entry.outcome
        if outcome is None or seconds_since(outcome.when) > _LATE_S:
            return False
        if change is not None and change.after == number and outcome.aliases.get(alias) != number:
            return True
    return False


def _differing(aliases: Mapping[str, str], expected: Mapping[str, str]) -> set[str]:
    return {alias for alias in {*aliases, *expected} if aliases.get(alias) != expected.get(alias)}
