"""An error as tests expect it: by its code, and the setting it is about."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from components.common.contracts.errors import EngineryError


@contextmanager
def refuses(code: str, setting: str | None = None, *, says: str = "") -> Iterator[pytest.ExceptionInfo[EngineryError]]:
    """Check that the body ends with an error of this code about this setting, whose message has these words."""
    with pytest.raises(EngineryError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert setting in (None, caught.value.setting), caught.value
    assert says in str(caught.value)
