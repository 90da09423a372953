"""Sources of a model repository: a registered version, a release, or a bundle."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import ALL_FILES, MANIFEST, Artifact, BundleManifest, ReportManifest, load
from components.common.contracts.records import EngineEntry, Precision
from components.common.registry.trust import check_chain, check_folder, read_statements
from components.common.runtimes import measured_plans
from enginery.registry.models import find_version, is_reference, open_registry
from enginery.release.verify import (
    PARTS,
    SUMS,
    Chain,
    ReleaseRecord,
    contradictions,
    copy_release,
    load_chain,
    verify,
)

if TYPE_CHECKING:  # MLflow takes seconds to import
    from components.common.registry.model_registry import RegisteredVersion, Registry


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """One precision of a bundle, and what is known of it."""

    name: str
    version: str  # empty where it came from no registry
    precision: Precision
    bundle: Artifact[BundleManifest]
    report: Artifact[ReportManifest] | None  # None where nothing was measured
    digests: dict[str, str] = field(default_factory=dict)  # of bundle, report and verdict
    statements: dict[str, bytes] = field(default_factory=dict)  # signed, by file name

    @property
    def measured_engines(self) -> tuple[EngineEntry, ...]:
        """The plans of the precision that the report has measured; others are not served."""
        measured = measured_plans(self.report.manifest.accuracy) if self.report is not None else set()
        engines = self.bundle.manifest.engines
        return tuple(entry for entry in engines if entry.precision == self.precision and entry.file in measured)

    @property
    def measured_on(self) -> tuple[str, ...]:
        """The CPU's instruction sets that the report measured the precision with; empty where it has none."""
        return self.report.manifest.accuracy.measured_on(self.precision) if self.report is not None else ()


@contextmanager
def find_source(text: str, precision: Precision | None) -> Iterator[ModelSource]:
    """Open the source that `text` names, with every file checked, as long as the context lasts.

    Args:
        text: NAME@alias, NAME/3, or the folder of a release or of a bundle.
        precision: None for what the verdict says to ship; of a bundle alone INT8.

    Raises:
        UserError: it means nothing that can be served.
        GateFailed: the version did not pass its gate, and nobody overruled that.
        EngineryError: files are gone or were changed.
    """
    folder = Path(text).expanduser()
    if is_reference(text):
        registry = open_registry()
        with registry.reached("nothing is served"):
            version = find_version(registry, text)
            with registered_chain(registry, version) as chain:
                yield of_chain(chain, version.name, version.number, precision, registry.statements(version))
    elif (folder / SUMS).is_file():
        with TemporaryDirectory(prefix="enginery-") as temporary:  # what is checked can't be swapped any more
            copied = copy_release(folder, Path(temporary) / "release", text)
            record, chain = open_release(copied, text)
            yield of_chain(chain, record.name, record.version, precision, read_statements(copied))
    elif (folder / MANIFEST).is_file():
        bundle = load(folder, BundleManifest, verify=ALL_FILES)
        check_chain(f"the bundle {folder}", {"bundle": bundle.digest}, read_statements(folder))
        yield ModelSource(
            name=bundle.manifest.architecture.replace("/", "-"),
            version="",
            precision=precision or "int8",
            bundle=bundle,
            report=None,
            digests={"bundle": bundle.digest},
        )
    else:
        raise UserError(
            f"{text!r} is nothing that can be served. Name a registered version, such as classifier@champion (see "
            "`enginery models`), or the folder of a release, of a bundle, or of what `enginery serve export` wrote",
            code="nothing-to-serve",
        )


@contextmanager
def registered_chain(
    registry: "Registry", version: "RegisteredVersion", environment: str | None = None
) -> Iterator[Chain]:
    """Bundle, report and verdict of a version that may leave the registry, as long as the context lasts.

    Args:
        registry: of the version.
        version: which one.
        environment: that it is for; None for this machine's own, "" for none.

    Raises:
        GateFailed: its verdict is no pass.
        EngineryError: its files are gone, were changed, don't belong together, or are not what was promoted; or nobody
            whom the machine's policy trusts vouches for it.
    """
    from components.common.registry.audit_log import AuditLog
    from components.common.registry.version_evaluation import check_log

    with ExitStack() as stack:
        chain = load_chain(*(stack.enter_context(registry.files(version, part)) for part in PARTS))
        check_log(version, AuditLog(registry.client, version.name).read(), chain.parts)
        statements = registry.statements(version)
        check_chain(
            version.label, chain.parts, statements, environment=environment, model=version.name, version=version.number
        )
        if not chain.verdict.manifest.passed:
            message = f"{version.label} did not pass its gate, and nothing overrules that: see `enginery audit`"
            raise GateFailed(message, code="gate-failed")
        for problem in contradictions(chain):
            raise EngineryError(f"{version.label} does not fit itself: {problem}", code="inconsistent-version")
        yield chain


def open_release(folder: Path, shown: str) -> tuple[ReleaseRecord, Chain]:
    """Record and artifacts of a release, all of it as it was released.

    Args:
        folder: a copy that nobody else can write.
        shown: where it is from, for people.

    Raises:
        EngineryError: it was changed, or nobody whom the machine's policy trusts vouches for it.
    """
    what = f"the release {shown}"
    check_folder(what, folder)
    checked = verify(folder)
    record, chain = checked.record, checked.chain
    if checked.problems or record is None or chain is None:
        raise EngineryError(f"{what} is refused: {'; '.join(checked.problems)}", code="release-refused")
    statements = read_statements(folder)
    check_chain(what, chain.parts, statements, model=record.name, version=record.version, say=lambda text: None)
    return record, chain


def of_chain(
    chain: Chain, name: str, version: str, precision: Precision | None, statements: dict[str, bytes]
) -> ModelSource:
    """A precision of it; None for what its verdict says to ship.

    Raises:
        UserError: the precision was not validated.
    """
    if precision is not None and (row := chain.report.manifest.accuracy.row(precision)).score_pct is None:
        raise UserError(
            f"{name} {version} was not validated in {precision.upper()} ({row.note}), so it is not served: leave "
            "--precision out, or validate it where that runs",
            code="not-validated",
            setting="--precision",
        )
    return ModelSource(
        name=name,
        version=version,
        precision=precision or chain.verdict.manifest.served_precision,
        bundle=chain.bundle,
        report=chain.report,
        digests=chain.parts,
        statements=statements,
    )
