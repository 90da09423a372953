"""Trying again what may succeed a moment later, for a bounded time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from components.common.errors import EngineryError
from pipelines.client.addresses import Address
from pipelines.client.failures import failure

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long an answer is waited for, and for how long a request is sent again.

    Only what a repeated request can mend is repeated: no connection, and a server that is full. The pauses double,
    each drawn between half of it and all of it, so that many clients do not come back at the same moment.
    """

    timeout_s: float = 10.0  # of one attempt
    retry_s: float = 10.0  # from the first attempt to the last; 0 tries once
    first_pause_s: float = 0.1
    most_pause_s: float = 2.0


async def persist(
    call: Callable[[], Awaitable[Result]], patience: Patience, address: Address, note_retry: Callable[[], None]
) -> Result:
    """The call's result, in as many attempts as patience allows.

    Args:
        call: one attempt.
        patience: how long.
        address: for the messages.
        note_retry: called before each further attempt, to count them.

    Raises:
        ServingError: the last attempt's failure.
    """
    clock, pause_s = asyncio.get_running_loop().time, patience.first_pause_s
    started = clock()
    while True:
        try:
            async with asyncio.timeout(patience.timeout_s):
                return await call()
        except EngineryError:
            raise  # what we found out ourselves of an answer
        except Exception as error:
            failed = failure(error, address, patience.timeout_s)
            wait_s = pause_s * random.uniform(0.5, 1)
            if not failed.retriable or clock() + wait_s - started > patience.retry_s:
                raise failed from error
        await asyncio.sleep(wait_s)
        note_retry()
        pause_s = min(2 * pause_s, patience.most_pause_s)
