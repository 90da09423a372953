"""Copies of what DALI has on a GPU, with CUDA's events played by hand."""

import weakref
from typing import Any

import pytest
import torch

from components.common.data.loader import OwnedOutputs


class Event:
    """One that is over when the test says so, or somebody waits for it."""

    every: list["Event"]

    def __init__(self) -> None:
        self.over, self.waited = False, False
        Event.every.append(self)

    def record(self, stream: Any) -> None:
        assert stream == "current"

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over, self.waited = True, not self.over


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.every = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")


def test_an_output_lives_until_it_is_copied() -> None:
    owned, alive = OwnedOutputs(), []
    for number in range(4):
        output = torch.full((2, 4, 4, 3), float(number)).permute(0, 3, 1, 2)
        alive.append(weakref.ref(output))
        copy = owned.copied(output)
        assert torch.equal(copy, output)
        assert copy.data_ptr() != output.data_ptr()
        assert copy.is_contiguous(memory_format=torch.channels_last)
        del output
        if number == 1:
            Event.every[0].over = True
            assert alive[0]() is not None
    # The first was over by itself. Two more may be under way: for the next one somebody had to wait.
    assert [event.waited for event in Event.every] == [False, True, False, False]
    assert [reference() is None for reference in alive] == [True, True, False, False]
