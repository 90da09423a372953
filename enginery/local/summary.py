"""The result of a run as data: what the final table shows, and what --summary writes."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from components.common.contracts.environment import Environment
from components.common.contracts.manifests import ReportManifest, VerdictManifest
from components.common.contracts.records import (
    AccuracyReport,
    BenchmarkReport,
    GateCheck,
    Recommendation,
    Record,
    Speedup,
    measures,
)

if TYPE_CHECKING:  # it imports KFP
    from enginery.local.caching import CachedStep


class StepSummary(Record):
    """One step of the run. The four parts of `seconds_total` say where the time went."""

    name: str
    status: Literal["done", "failed", "reused"]
    outcome: str = Field(description="The step's closing line, or its error message.")
    seconds_total: float = Field(description="Wall time from the end of the step before.")
    seconds_work: float = Field(0.0, description="The step's own work.")
    seconds_imports: float = Field(0.0, description="Starting Python and importing libraries.")
    seconds_tracking: float = Field(0.0, description="Talking to MLflow, uploads included.")

    @property
    def seconds_overhead(self) -> float:
        """Time that is neither work nor imports nor tracking."""
        return self.seconds_total - self.seconds_work - self.seconds_imports - self.seconds_tracking


class PrecisionRow(Record):
    """One line of the table."""

    precision: str
    runtime: str
    device: str
    num_images: int
    score_pct: float | None
    top5_pct: float | None
    delta_points: float | None
    p50_ms: float | None = Field(description="Median latency at batch 1, in milliseconds; None where it is unsure.")
    latency_doubt: str = Field("", description="Why it is unsure; empty where it is not.")
    images_per_s: float | None = Field(description="Throughput at the largest measured batch; None where it is unsure.")
    throughput_batch_size: int | None
    speedup: Speedup | None = Field(None, description="Throughput over FP32's at that batch; None for FP32 itself.")
    size_bytes: int
    verdict: str = Field(
        description='"reference", "pass", "pass, not proved", "fail", "not enough evidence", or "" where the gate did '
        "not look."
    )
    note: str


class RunSummary(Record):
    """Everything about one run of a pipeline."""

    schema_version: Literal[1] = 1
    pipeline: str
    run_id: str
    status: Literal["done", "failed", "killed"]
    exit_code: int
    message: str = Field(description="Why the run failed; empty otherwise.")
    seconds_total: float
    arguments: dict[str, Any]
    steps: list[StepSummary]
    score_name: str = "top-1"
    unit: str = "images"
    rows: list[PrecisionRow]
    checks: list[GateCheck]
    recommendation: Recommendation | None = Field(None, description="What to ship; None where nothing leads to it.")
    registered: str = Field("", description='"name/version", if the run got so far.')
    champion: bool = Field(False, description="Whether that version became the champion.")
    promotion: str = Field("", description="Why it did, or why it did not.")
    report: str = Field("", description="Path of report.html, if the run got so far.")
    run_directory: str
    tracking_uri: str
    mlflow_run_id: str
    environment: Environment
    dataset_digest: str = Field("", description="Manifest digest of the Dataset; empty if nothing was measured.")
    split_digest: str = Field("", description="Digest of the validation split that the rows were measured on.")
    bundle_digest: str = Field("", description="Manifest digest of the Bundle that was measured.")

    @property
    def verdict(self) -> str:
        """Such as "INT8 pass"; empty where the gate did not come to one."""
        judged = [row for row in self.rows if row.verdict not in ("", "reference")]
        return f"{judged[0].precision.upper()} {judged[0].verdict}" if judged else ""


class SummaryBuilder:
    """Collects a run's events."""

    def __init__(self, started: float) -> None:
        """`started` is when the chain began, on the clock of time.time()."""
        self.steps: list[StepSummary] = []
        self.failure: dict[str, Any] | None = None
        self.seen: dict[str, Any] = {"checks": []}  # fields of the summary
        self.running = ""  # the step that has started and not ended
        self._accuracy: AccuracyReport | None = None
        self._benchmark: BenchmarkReport | None = None
        self._verdict: dict[str, Any] | None = None
        self._last_end = started

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind = event["event"]
        if kind == "started":
            self.running = event["step"]
        elif kind in ("finished", "failed"):
            seconds, failed = event.get("seconds", {}), kind == "failed"
            self.steps.append(
                StepSummary(
                    name=event["step"],
                    status="failed" if failed else "done",
                    outcome=event["message"] if failed else event["outcome"],
                    seconds_total=event["time"] - self._last_end,
                    seconds_work=seconds.get("work", 0.0),
                    seconds_imports=seconds.get("imports", 0.0),
                    seconds_tracking=seconds.get("tracking", 0.0),
                )
            )
            self._last_end = event["time"]
            self.running = ""
            if failed:
                self.failure = event
        elif kind == "results":
            self._accuracy = AccuracyReport.model_validate(event["accuracy"])
            self._benchmark = BenchmarkReport.model_validate(event["benchmark"])
            self.seen["report"] = event.get("report", "")
        elif kind == "verdict":
            self._verdict = event
            self.seen |= {"checks": event["checks"], "recommendation": event.get("recommendation")}
        elif kind == "promotion":
            registered = f"{event['registered_model']}/{event['version']}"
            self.seen |= {"registered": registered, "champion": event.get("champion", False)}
            self.seen["promotion"] = event.get("why", "")

    def add_reused(self, cached: "CachedStep") -> None:
        """Add a step that was not repeated, from the artifact that it left."""
        outcome = f"reused from {cached.run_id}"
        self.steps.append(StepSummary(name=cached.step, status="reused", outcome=outcome, seconds_total=0.0))
        if isinstance(cached.manifest, ReportManifest):
            self._accuracy, self._benchmark = cached.manifest.accuracy, cached.manifest.benchmark
            self.seen["report"] = str(cached.path / "report.html")
        elif isinstance(cached.manifest, VerdictManifest):
            self._verdict = {"word": cached.manifest.word, "precision": cached.manifest.precision}
            self.seen |= {"checks": cached.manifest.checks, "recommendation": cached.manifest.recommendation}

    def summary(self, **fields: Any) -> RunSummary:
        """Return what the events say, with the `fields` that they do not have."""
        if self._accuracy is not None:
            names = ("dataset_digest", "split_digest", "bundle_digest", "score_name", "unit")
            self.seen |= {name: getattr(self._accuracy, name) for name in names}
        return RunSummary(**{**self.seen, "steps": self.steps, "rows": self.rows(), **fields})

    def headline(self) -> dict[str, float]:
        """The rows as MLflow metrics, by which runs compare in a list."""
        if self._accuracy is None or self._benchmark is None:
            return {}
        return measures(self._accuracy, self._benchmark)

    def rows(self) -> list[PrecisionRow]:
        """The table's lines, FP32 first."""
        if self._accuracy is None or self._benchmark is None:
            return []
        largest = max((row.batch_size for row in self._benchmark.rows), default=0)
        rows = []
        for accuracy in self._accuracy.rows:
            single = self._benchmark.row(accuracy.precision, 1)
            batched = self._benchmark.row(accuracy.precision, largest)
            rows.append(
                PrecisionRow(
                    **accuracy.model_dump(include=set(PrecisionRow.model_fields)),
                    p50_ms=single.sure_p50_ms if single else None,
                    latency_doubt=single.busy if single else "",
                    images_per_s=self._benchmark.sure_images_per_s(batched) if batched else None,
                    throughput_batch_size=largest if batched else None,
                    speedup=batched.over.get("fp32") if batched else None,
                    verdict=self._verdict_on(accuracy.precision),
                )
            )
        return rows

    def _verdict_on(self, precision: str) -> str:
        if precision == "fp32":
            return "reference"
        if self._verdict is None or self._verdict["precision"] != precision:
            return ""
        return str(self._verdict["word"])
