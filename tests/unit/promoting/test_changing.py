"""The log as a lock: what happens to changes that meet, stop in the middle, or come too late."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.changing import Proposal, Situation, champions, change_aliases, explained
from components.common.errors import EngineryError, UserError
from components.common.holder import is_gone, this_process
from components.common.ledger import Entry, Ledger, chain_problems, experiment_name, now
from components.common.promotions import AliasChange, Change, Outcome
from components.common.registry import Registry
from pipelines.lineage import trace


@pytest.fixture
def model(registry: Registry, tmp_path: Path) -> str:
    """A registered model with five versions and no alias."""
    registry.client.create_registered_model("m")
    for _ in range(5):
        registry.client.create_model_version("m", str(tmp_path))
    return "m"


def to(number: str, kind: str = "by hand") -> Callable[[Situation], Proposal]:
    return lambda situation: Proposal(kind=kind, aliases={"champion": number}, why=f"to {number}")  # type: ignore[arg-type]


def begun(registry: Registry, number: str, **holder: object) -> Entry:
    """An entry of a process that stopped right after it was written."""
    ledger = Ledger(registry.client, "m")
    entries = ledger.read()
    last = entries[-1] if entries else None
    change = Change(
        model="m",
        kind="promote",
        changes={"champion": AliasChange(before=explained(entries).get("champion"), after=number)},
        why="begun",
        when=now(),
        holder=this_process().model_copy(update={"pid": 2**22 - 1, **holder}),
        previous=last.run_id if last else "",
        previous_digest=last.digest if last else "",
    )
    entry = ledger.append(change, last)
    assert entry is not None
    return entry


def told(registry: Registry) -> str:
    """What `enginery audit` says is wrong, but for the versions of these tests, which hold nothing."""
    return "; ".join(problem for problem in trace(registry, "m").problems if "was not registered by" not in problem)


def outcomes(registry: Registry) -> list[str]:
    entries = Ledger(registry.client, "m").read()
    assert explained(entries) == registry.aliases("m")
    assert chain_problems(entries) == []
    return [entry.outcome.status if entry.outcome else "none" for entry in entries]


def test_a_process_knows_whether_another_one_lives() -> None:
    here = this_process()
    assert not is_gone(here)
    assert is_gone(here.model_copy(update={"pid": 2**22 - 1}))
    assert is_gone(here.model_copy(update={"started_ticks": here.started_ticks - 1}))  # its number was used again
    assert not is_gone(here.model_copy(update={"pid": 2**22 - 1, "boot": "another machine"}))


def test_killed_before_the_alias_was_set(registry: Registry, model: str) -> None:
    change_aliases(registry, model, to("1"))
    begun(registry, "2")
    assert "has no outcome: it is going on, or it was killed (@champion is 1)" in told(registry)
    change_aliases(registry, model, to("3"))
    assert outcomes(registry) == ["done", "not done", "done"]
    assert trace(registry, model).aliases == {"champion": "3"}


def test_killed_after_the_alias_was_set(registry: Registry, model: str) -> None:
    begun(registry, "2")
    registry.set_alias(model, "champion", "2")
    assert "has no outcome: it is going on, or it was killed (@champion is 2)" in told(registry)
    change_aliases(registry, model, to("3"))
    entries = Ledger(registry.client, model).read()
    assert outcomes(registry) == ["done", "done"]
    assert entries[0].outcome is not None
    assert "@" in entries[0].outcome.settled_by
    assert champions(entries) == ["2", "3"]


def test_on_another_machine_it_is_waited_for_as_long_as_the_lease(registry: Registry, model: str) -> None:
    begun(registry, "2", boot="another machine", host="elsewhere")
    said: list[str] = []
    change_aliases(registry, model, to("3"), lease_s=3.0, say=said.append)
    assert outcomes(registry) == ["not done", "done"]
    assert "elsewhere (process 4194303) is changing m; waiting for it, 3 s at most" in said[0]


def test_one_that_comes_after_all_is_undone(registry: Registry, model: str) -> None:
    """Stopped between its last look and the alias for longer than the lease, and then let go on."""
    change_aliases(registry, model, to("1"))
    begun(registry, "2")
    change_aliases(registry, model, to("3"))
    registry.set_alias(model, "champion", "2")  # the late one
    change_aliases(registry, model, to("4"))
    entries = Ledger(registry.client, model).read()
    assert [entry.change.kind for entry in entries] == ["by hand", "promote", "by hand", "repair", "by hand"]
    assert entries[3].change.changes["champion"] == AliasChange(before="2", after="3")
    assert outcomes(registry) == ["done", "not done", "done", "done", "done"]
    assert champions(entries) == ["1", "3", "4"]


def test_one_that_notices_that_it_is_too_late(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when it comes to the alias: it leaves it alone, says so, and begins anew."""
    change_aliases(registry, model, to("1"))
    append, pauses_s = Ledger.append, [1.2]

    def slow(self: Ledger, change: Change, last: Entry | None) -> Entry | None:
        entry = append(self, change, last)
        time.sleep(pauses_s.pop() if pauses_s else 0)
        return entry

    monkeypatch.setattr(Ledger, "append", slow)
    change_aliases(registry, model, to("2"), lease_s=2.0)
    assert outcomes(registry) == ["done", "not done", "done"]
    assert registry.aliases(model) == {"champion": "2"}


def test_an_interrupt_leaves_nothing_to_wait_for(
    registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "set_alias", interrupt)
        with pytest.raises(KeyboardInterrupt):
            change_aliases(registry, model, to("2"))
    assert outcomes(registry) == ["not done"]
    assert told(registry) == ""


def test_a_decision_is_made_again_when_another_change_comes_first(registry: Registry, model: str) -> None:
    change_aliases(registry, model, to("1"))
    seen: list[str | None] = []

    def slow(situation: Situation) -> Proposal:
        seen.append(situation.champion)
        if len(seen) == 1:
            change_aliases(registry, model, to("2"))  # another process, while this one decides
        return to("3")(situation)

    change_aliases(registry, model, slow)
    assert seen == ["1", "2"]
    assert outcomes(registry) == ["done", "done", "done"]


def test_a_run_that_never_got_into_the_log_is_ended(registry: Registry, model: str) -> None:
    change_aliases(registry, model, to("1"))
    experiment_id = registry.client.get_experiment_by_name(experiment_name(model)).experiment_id
    dead = this_process().model_copy(update={"pid": 2**22 - 1})
    runs = [
        registry.client.create_run(experiment_id, tags={"enginery.holder": holder.model_dump_json()}).info.run_id
        for holder in (dead, this_process())
    ]
    change_aliases(registry, model, to("2"))
    assert [registry.client.get_run(run_id).info.status for run_id in runs] == ["KILLED", "RUNNING"]
    assert outcomes(registry) == ["done", "done"]


def test_what_is_written_once_stays(registry: Registry, model: str) -> None:
    ledger = Ledger(registry.client, model)
    entry = begun(registry, "2")
    first = ledger.close(entry, Outcome(status="not done", aliases={"champion": None}, when=now()))
    second = ledger.close(entry, Outcome(status="done", aliases={"champion": "2"}, when=now()))
    assert second == first
    assert ledger.append(entry.change, None) is None  # the place is taken


def test_a_log_that_was_tampered_with(registry: Registry, model: str) -> None:
    change_aliases(registry, model, to("1"))
    change_aliases(registry, model, to("2"))
    entries = Ledger(registry.client, model).read()
    assert chain_problems(entries) == []
    why = entries[0].change.model_copy(update={"why": "another reason"})
    changed = Entry(run_id=entries[0].run_id, number=1, change=why, outcome=entries[0].outcome, next_id="")
    assert chain_problems([changed, entries[1]]) == ["entry 2 does not follow on what entry 1 says now"]


def test_a_log_that_was_deleted(registry: Registry, model: str) -> None:
    change_aliases(registry, model, to("1"))
    found = registry.client.get_experiment_by_name(experiment_name(model))
    (run, *_) = registry.client.search_runs([found.experiment_id], "tags.why = 'to 1'")
    registry.client.delete_run(run.info.run_id)
    assert told(registry) == ""  # a deleted run is still there
    with pytest.raises(UserError, match=r"was deleted in MLflow. Put it back: mlflow runs restore --run-id \w{32}"):
        change_aliases(registry, model, to("2"))
    registry.client.delete_experiment(found.experiment_id)
    with pytest.raises(UserError, match=r"the audit log of m was deleted in MLflow. Put it back: mlflow experiments"):
        change_aliases(registry, model, to("2"))


def test_a_record_that_is_too_long(registry: Registry, model: str) -> None:
    with pytest.raises(UserError, match=r"does not fit into MLflow's 6000: shorten --why"):
        change_aliases(registry, model, lambda _: Proposal(kind="by hand", aliases={"champion": "1"}, why="x" * 7000))
    assert registry.aliases(model) == {}


def test_what_never_comes_true_is_not_tried_for_ever(registry: Registry, model: str) -> None:
    """Something else sets the alias after each try, so that no entry is ever done."""
    ledger = Ledger(registry.client, model)

    class Contested(Registry):
        def set_alias(self, name: str, alias: str, number: str | None) -> None:
            super().set_alias(name, alias, number)
            super().set_alias(name, alias, "5")

    with pytest.raises(EngineryError, match="the aliases of m are not changed: 5 tries came to nothing"):
        change_aliases(Contested(registry.client), model, to("1"))
    assert len(ledger.read()) < 10
    assert {entry.outcome.status for entry in ledger.read() if entry.outcome} <= {"done", "not done"}
