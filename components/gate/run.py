"""gate: Report -> Verdict, or exit code 3."""

from pathlib import Path

from components.common.contracts.errors import GateFailed, UserError
from components.common.contracts.manifests import (
    ALL_FILES,
    Artifact,
    ReportManifest,
    VerdictManifest,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.contracts.verdict import Thresholds, judge, remedy
from components.common.process.steplog import StepLog
from components.common.registry.keys import step_key
from components.common.registry.trust import VERDICT, sign_verdict
from components.gate.config import GateConfig


def run(config: GateConfig, log: StepLog, *, report: Path, output: Path) -> str:
    """Check, write the verdict, then fail if it is one. See the package's docstring.

    Raises:
        GateFailed: a check did not pass.
        UserError: the report was written for other thresholds, so it would contradict the verdict.
    """
    key = step_key()
    measured = load(report, ReportManifest, verify=ALL_FILES)  # all files, they are small
    _check_thresholds(config, measured)
    prepare_directory(output)
    accuracy = measured.manifest.accuracy
    verdict = judge(config, accuracy, measured.manifest.benchmark)
    sealed = seal(
        output,
        VerdictManifest,
        inputs={"report": measured.digest, "bundle": accuracy.bundle_digest},
        config=config,
        **{name: value for name, value in verdict if name != "thresholds"},
    )
    if key is not None:
        digests = {"bundle": accuracy.bundle_digest, "report": measured.digest, "verdict": sealed.digest}
        write_atomically(output / VERDICT, sign_verdict(digests, verdict.passed, key))
    word, advice = sealed.manifest.word, verdict.recommendation
    log.event(
        "verdict",
        passed=verdict.passed,
        word=word,
        precision=verdict.precision,
        checks=[check.model_dump() for check in verdict.checks],
        recommendation=advice.model_dump() if advice else None,
    )
    log.metrics({"gate_passed": float(verdict.passed)})
    log.tags({"enginery.verdict": word})
    log.result(tags={"enginery.verdict": f"{verdict.precision.upper()} {word}"})
    suffix = f" ({verdict.note})" if verdict.note else ""
    if advice is not None and advice.precision != verdict.precision:
        suffix += f". Recommended: {advice.precision.upper()}, since {advice.reason}"
    if not verdict.passed:
        suffix += f". {advised}" if (advised := remedy(config, accuracy, verdict.checks)) else ""
        # Failed checks, then those with too little evidence, which ask for something else.
        failed = [check.explanation for check in verdict.checks if check.verdict == "fail"]
        if undecided := [check.explanation for check in verdict.checks if check.verdict == "not enough evidence"]:
            failed.append(f"not enough evidence: {'; '.join(undecided)}")
        raise GateFailed(f"{verdict.precision.upper()} did not pass: {'; '.join(failed)}{suffix}", code="gate-failed")
    return f"{verdict.precision.upper()} passed: {'; '.join(check.explanation for check in verdict.checks)}{suffix}"


def _check_thresholds(config: GateConfig, report: Artifact[ReportManifest]) -> None:
    shown = Thresholds.model_validate(report.manifest.config.get("gate", {})).model_dump()
    own = config.model_dump()
    if different := {name: (shown[name], own[name]) for name in own if own[name] != shown[name]}:
        there = " ".join(f"--{name.replace('_', '-')} {shown}" for name, (shown, _) in different.items())
        # --gate is set as a whole: what both agree on must be said again.
        fields = GateConfig.model_fields
        kept = {name: value for name, value in own.items() if name in different or value != fields[name].default}
        here = ", ".join(f"{name}: {value}" for name, value in kept.items())
        raise UserError(
            f"the report {report.path} shows the verdict of other thresholds than the gate's: "
            f"{'; '.join(f'{name} {shown} there, {own} here' for name, (shown, own) in different.items())}. "
            f"Run the gate with the report's ({there}), or validate again with the gate's (--gate '{{{here}}}')",
            code="other-thresholds",
            setting=next(iter(different)),
        )
