"""The log decides, and the aliases follow it: changes that meet, stop in the middle, or come from elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from components.common.registry.audit_log import (
    AuditLog,
    Proposal,
    Situation,
    champions,
    change_aliases,
    expected_aliases,
    experiment_name,
)
from components.common.registry.model_registry import Registry
from enginery.registry.audit import trace
from tests.unit.registered import refuses


@pytest.fixture
def model(registry: Registry, tmp_path: Path) -> str:
    """A registered model with five versions and no alias."""
    registry.client.create_registered_model("m")
    for _ in range(5):
        registry.client.create_model_version("m", str(tmp_path))
    return "m"


def to(number: str, alias: str = "champion") -> Callable[[Situation], Proposal]:
    return lambda situation: Proposal(kind="manual", aliases={alias: number}, why=f"to {number}")


def logged(registry: Registry) -> list[str]:
    """The champions of the log, which the alias shows."""
    entries = AuditLog(registry.client, "m").read()
    assert expected_aliases(entries, registry.run_ids("m")) == registry.aliases("m")
    return champions(entries)


def test_killed_before_the_alias_was_set(registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    change_aliases(registry, model, to("1"))
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "set_alias", interrupt)
        with pytest.raises(KeyboardInterrupt):
            change_aliases(registry, model, to("2"))
    assert any("@champion is version 1, by the log it is version 2" in text for text in trace(registry, model).problems)
    seen: list[str | None] = []

    def third(situation: Situation) -> Proposal:
        seen.append(situation.champion)
        assert registry.aliases(model) == {"champion": "2"}, "what was decided is done first"
        return to("3")(situation)

    change_aliases(registry, model, third)
    assert seen == ["2"]
    assert logged(registry) == ["1", "2", "3"]


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
    assert logged(registry) == ["1", "2", "3"]


def test_one_that_comes_to_its_alias_after_the_next_change(registry: Registry, model: str) -> None:
    """Stopped between its reading of the log and the alias: it sets the older one, and sees that it did."""

    class Slow(Registry):
        stopped = False

        def set_alias(self, name: str, alias: str, number: str | None) -> None:
            if not self.stopped:
                self.stopped = True
                change_aliases(registry, model, to("2"))
            super().set_alias(name, alias, number)

    change_aliases(Slow(registry.client), model, to("1"))
    assert registry.aliases(model) == {"champion": "2"}
    assert logged(registry) == ["1", "2"]


def test_two_that_add_an_alias_at_once(registry: Registry, model: str) -> None:
    """Another process adds it after MLflow has found none for this one, and before MLflow adds this one's."""

    def other(*_: object) -> None:
        change_aliases(registry, model, to("2"))

    event.listen(Session, "before_flush", other, once=True)
    registry.set_alias(model, "champion", "1")
    assert registry.aliases(model) == {"champion": "1"}
    change_aliases(registry, model, to("3"))
    assert logged(registry) == ["2", "3"]


def test_aliases_changed_elsewhere(registry: Registry, model: str) -> None:
    """Of those that the log has named the log counts; others are left alone, and reported."""
    change_aliases(registry, model, to("1"))
    registry.set_alias(model, "champion", "5")
    registry.set_alias(model, "theirs", "4")
    problems = " ".join(trace(registry, model).problems)
    assert "@champion is version 5, by the log it is version 1: it was changed without enginery" in problems
    assert "@theirs is version 4, by the log it is not set" in problems
    change_aliases(registry, model, to("2", "staging"))
    assert registry.aliases(model) == {"champion": "1", "staging": "2", "theirs": "4"}


def test_a_place_in_the_log_is_taken_once(registry: Registry, model: str) -> None:
    first = change_aliases(registry, model, to("1"))
    log = AuditLog(registry.client, model)
    assert log.append(first.change, 1) is not None  # a request that is repeated
    assert log.append(first.change.model_copy(update={"why": "another"}), 1) is None
    assert [entry.change.why for entry in log.read()] == ["to 1"]


def test_a_log_with_a_hole(registry: Registry, model: str) -> None:
    entry = change_aliases(registry, model, to("1"))
    AuditLog(registry.client, model).append(entry.change, 3)
    with refuses("log-damaged"):
        change_aliases(registry, model, to("2"))
    found = registry.client.get_experiment_by_name(experiment_name(model))
    registry.client.delete_experiment_tag(found.experiment_id, "enginery.first_entry")  # that names the run
    with refuses("log-damaged"):
        trace(registry, model)


def test_a_log_that_was_deleted(registry: Registry, model: str) -> None:
    entry = change_aliases(registry, model, to("1"))
    found = registry.client.get_experiment_by_name(experiment_name(model))
    for delete, name in (
        (registry.client.delete_run, entry.run_id),
        (registry.client.delete_experiment, found.experiment_id),
    ):
        delete(name)
        with refuses("log-deleted"):
            change_aliases(registry, model, to("2"))


def test_a_record_that_is_too_long(registry: Registry, model: str) -> None:
    with refuses("record-too-long", "--why"):
        change_aliases(registry, model, lambda _: Proposal(kind="manual", aliases={"champion": "1"}, why="x" * 7000))
    assert registry.aliases(model) == {}
