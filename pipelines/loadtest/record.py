"""What a load test measured, as it is written to loadtest.json."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from components.common.environment import Environment


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Level(_Record):
    """One load, held for some seconds."""

    concurrency: int | None = Field(None, description="Closed loop: clients, each of which waits for its answer.")
    request_rate: float | None = Field(None, description="Open loop: requests per second that were due, on average.")
    images_per_request: int
    duration_s: float = Field(description="Measured time, after the warm-up.")
    num_requests: int = Field(description="Requests that were due in the measured time.")
    errors: dict[str, int] = Field(description="Requests without an answer, by kind.")
    images_per_s: float = Field(description="Images of the answers that came in the measured time, over that time.")
    p50_ms: float | None = Field(description="Latency from when a request was due; time-outs count as long as waited.")
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    send_lag_p99_ms: float | None = Field(
        description="How late requests were sent. Much of it: the load generator is the limit."
    )
    batches: dict[int, int] = Field(description="Executions of the network by their batch size, from the server.")
    queue_ms: float | None = Field(description="Mean time in the network's queue, from the server.")
    compute_ms: float | None = Field(description="Mean time that a request's batch computed, from the server.")

    @property
    def mean_batch(self) -> float | None:
        """Images per execution of the network; None where nothing ran."""
        executions = sum(self.batches.values())
        return sum(size * count for size, count in self.batches.items()) / executions if executions else None

    @property
    def offered_images_per_s(self) -> float:
        """Images that were due, over the measured time."""
        return self.num_requests * self.images_per_request / self.duration_s

    @property
    def num_errors(self) -> int:
        """Requests without an answer."""
        return sum(self.errors.values())


class Knee(_Record):
    """The highest request rate at which all is well: answers keep up, none is missing, and p99 is within the budget."""

    request_rate: float = Field(description="Requests per second.")
    images_per_s: float
    p99_ms: float
    is_highest_tried: bool = Field(description="No higher rate was tried, so the knee may be above.")


class Series(_Record):
    """One configuration of the server under all loads."""

    name: str
    batching: dict[str, Any] | None = Field(description="Triton's dynamic_batching settings; None without.")
    closed: tuple[Level, ...]
    open: tuple[Level, ...]
    knee: Knee | None = Field(description="None where even the lowest rate was too much, or none was tried.")


class LoadTest(_Record):
    """All of it."""

    schema_version: Literal[1] = 1
    date: str
    url: str
    model: str
    network: str
    sent: str = Field(description="What the requests held, for people.")
    latency_budget_ms: float
    seconds_per_level: float
    client_cores: tuple[int, ...] | None = Field(description="Cores that the load generator was bound to.")
    max_batch_size: int
    instance_group: list[dict[str, Any]]
    series: tuple[Series, ...]
    failures: dict[str, int] = Field({}, description="The five most frequent reasons for no answer, and how often.")
    environment: Environment = Field(description="Of the load generator.")
