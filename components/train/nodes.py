"""Training that outlives its pod: in a volume, or as a TrainJob that is followed; stop when nobody waits."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from components.common.contracts.digests import digest_json
from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.common.contracts.errors import EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER_ERROR, EngineryError
from components.common.contracts.manifests import (
    ALL_FILES,
    FAILURE,
    MANIFEST,
    Artifact,
    CheckpointManifest,
    DatasetManifest,
    load,
    prepare_directory,
    write_atomically,
)
from components.common.process.dataset_volume import dataset_volumes, folder_of, make_folder
from components.common.process.steplog import StepLog
from components.train.config import TrainConfig
from components.train.train_job import GRACE_S, Job, JobFailed, Pod, TrainJobRequest, connect, this_pod, train_job

VARIABLE = "ENGINERY_HEARTBEAT"  # the file
_BEAT_S = 15.0
_SILENCE_S = 600.0  # longer than a network file system may hide what is new, or a node be out of reach
_HIDDEN_S = 60.0  # for which one usually does


@contextmanager
def beating(file: Path, *, every_s: float = _BEAT_S) -> Iterator[None]:
    """Touch the file until the end of the block, or of this process."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_s):
            with suppress(OSError):  # the next one may arrive
                file.touch()

    file.touch()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def stop_when_silent(log: StepLog, *, silence_s: float = _SILENCE_S) -> None:
    """Send this process SIGTERM once $ENGINERY_HEARTBEAT was not touched for so long, if it is set.

    By this machine's own clock, from one change of the file's time to the next: clocks of machines differ.
    """
    if name := os.environ.get(VARIABLE):
        threading.Thread(target=_listen, args=(Path(name), log, silence_s), name="heartbeat", daemon=True).start()


def _listen(file: Path, log: StepLog, silence_s: float) -> None:
    seen, since = None, time.monotonic()
    while True:
        time.sleep(silence_s / 40)
        with suppress(OSError):
            beat = file.stat().st_mtime_ns
            if beat != seen:
                seen, since = beat, time.monotonic()
        if time.monotonic() - since >= silence_s:  # after looking: this machine may have stood still itself
            break
    log.warning(
        f"nobody waits for this training any more: {file} was not touched for {silence_s / 60:g} minutes, so the step "
        "that started it is gone. It saves and stops; another try of that step resumes there"
    )
    with suppress(OSError):
        file.unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGTERM)


def abandoned(*, patience_s: float = _HIDDEN_S) -> str:
    """Return the outcome of a process that has nothing to do, as $ENGINERY_HEARTBEAT is gone; "" of others.

    JobSet restarts the container of a training that has stopped. With exit code 0 it is over, and its node is free.
    """
    if not (name := os.environ.get(VARIABLE)):
        return ""
    deadline = time.monotonic() + patience_s
    while not Path(name).exists():
        if time.monotonic() >= deadline:
            return f"nobody waits for this training: {name} is gone"
        time.sleep(patience_s / 60)
    return ""


_POLL_S = 5.0
_DELETE_S = 20.0  # to wait for pods when this one is asked to go: Kubernetes gives it 30 seconds


def train_on_nodes(
    request: TrainJobRequest, config: TrainConfig, log: StepLog, dataset: Path, output: Path, *, poll_s: float = _POLL_S
) -> str:
    """Train as a TrainJob. Returns the outcome.

    Raises:
        EngineryError: what rank 0 said if the job failed, with the last lines of the pods that did.
        UserError: the cluster can't do this, or the settings do not fit it.
        Preempted: SIGTERM came; the job is deleted, and its pods have been asked to save.
    """
    data = load(dataset, DatasetManifest)
    prepare_directory(output)
    api = connect()
    pod = this_pod(api)
    run_id = os.environ.get(KFP_RUN_VARIABLE) or pod.uid
    key = _key(run_id, data, config)
    own = make_folder(Path(request.shared), f"runs/{run_id}-{key}", "train_job.volume")
    shared = _share(data, Path(request.shared), own, log)
    checkpoint, settings, heartbeat = own / "checkpoint", own / "config.yaml", own / "heartbeat"
    write_atomically(settings, yaml.safe_dump(config.model_dump(mode="json")).encode())
    body = train_job(
        request,
        name=f"enginery-train-{key}",
        arguments=["--dataset", str(shared), "--output", str(checkpoint), "--config", str(settings)],
        env=[*_tracking(pod, log), {"name": VARIABLE, "value": str(heartbeat)}],
        owner=pod.reference,
        run_id=run_id,
    )
    job = Job(api, pod.namespace, body["metadata"]["name"])
    for folder in (own, checkpoint):
        (folder / FAILURE).unlink(missing_ok=True)  # an earlier try's
    try:
        with beating(heartbeat):
            _start(job, body, log)
            log.note(f"TrainJob {job.name} on {request.num_nodes} nodes with {request.num_gpus} GPUs each")
            job.wait(log.note, partial(print, file=sys.stderr, flush=True), poll_s, lambda: _is_final(_failure(own)))
        if not (checkpoint / MANIFEST).exists():
            raise job.failed(
                f"its nodes stopped, as they did not see {heartbeat} change for {_SILENCE_S / 60:g} minutes; "
                "another try of this step resumes"
            )
    except JobFailed as failed:
        raise _format_failure(failed, _failure(own)) from None
    finally:
        if job.may_exist:
            _remove(job, log)
    manifest = _copy_result(checkpoint, own, output)
    return (
        f"{manifest.architecture} at {manifest.metrics['val_score_pct']:.2f} % {manifest.score_name} after epoch "
        f"{manifest.published_epoch} on {request.num_nodes} nodes"
    )


def train_in_volume(
    train: Callable[[Path], str], volume: Path, config: TrainConfig, dataset: Path, output: Path
) -> str:
    """Train in a folder of a volume, which another try of this step of the same KFP run finds. Returns the outcome.

    KFP ends a step's pod without waiting for the step, and what lies in the pod goes with it.
    """
    prepare_directory(output)
    run_id = os.environ[KFP_RUN_VARIABLE]
    key = _key(run_id, load(dataset, DatasetManifest), config)
    own = make_folder(volume, f"runs/{run_id}-{key}", "train_job.volume")
    outcome = train(own / "checkpoint")
    _copy_result(own / "checkpoint", own, output)
    return outcome


def _key(run_id: str, data: Artifact[DatasetManifest], config: TrainConfig) -> str:
    return digest_json([run_id, data.digest, config.model_dump(mode="json")]).removeprefix("sha256:")[:10]


def _share(data: Artifact[DatasetManifest], root: Path, own: Path, log: StepLog) -> Path:
    """Return the dataset where all nodes see it: as it is, or a copy, which an earlier run may have made."""
    if any(data.path.resolve().is_relative_to(shared.resolve()) for shared in (root, *dataset_volumes())):
        return data.path
    target = folder_of(root, data.digest)
    if (target / MANIFEST).exists():
        if load(target, DatasetManifest).digest != data.digest:
            text = f"{target} holds another dataset than its name says; remove it"
            raise EngineryError(text, code="dataset-changed")
        log.note(f"the dataset is in the shared volume already: {target}")
        return target
    partial_copy = own / "dataset"
    shutil.rmtree(partial_copy, ignore_errors=True)  # of a try that was killed
    files = [path for path in sorted(data.path.rglob("*")) if path.is_file()]
    for number, file in enumerate(files):
        copy = partial_copy / file.relative_to(data.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        log.progress("copying to the shared volume", number + 1, len(files), unit="files")
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # another run has just put the same there
        partial_copy.rename(target)
    shutil.rmtree(partial_copy, ignore_errors=True)
    if load(target, DatasetManifest).digest != data.digest:
        text = f"the dataset changed while it was copied to {target}; remove that folder and try again"
        raise EngineryError(text, code="dataset-changed")
    return target


def _tracking(pod: Pod, log: StepLog) -> list[dict[str, Any]]:
    """Return the variables of rank 0 to log into this step's run, secrets by reference as this pod has them."""
    env = {entry["name"]: entry for entry in pod.env if entry["name"].startswith("MLFLOW_")}
    if log.run is not None and log.run.run_id:
        env["MLFLOW_RUN_ID"] = {"name": "MLFLOW_RUN_ID", "value": log.run.run_id}
        env["MLFLOW_EXPERIMENT_ID"] = {"name": "MLFLOW_EXPERIMENT_ID", "value": log.run.experiment_id}
    return list(env.values())


def _start(job: Job, body: dict[str, Any], log: StepLog) -> None:
    if job.create(body):
        return
    log.note(f"an earlier try of this step left the TrainJob {job.name}; it goes before a new one starts")
    if not job.delete(GRACE_S + 60) or not job.create(body):
        raise EngineryError(
            f"the TrainJob {job.name} of an earlier try does not go; see what its pods do: kubectl -n "
            f"{job.namespace} describe trainjob {job.name}",
            code="train-job-stuck",
        )


def _remove(job: Job, log: StepLog) -> None:
    """Remove the job, whatever happened. Where that fails it goes with this pod, to which it belongs."""
    try:
        if not job.delete(_DELETE_S):
            log.warning(f"the pods of the TrainJob {job.name} are still there")
    except EngineryError as error:
        log.warning(f"{error}; the TrainJob {job.name} goes when this pod is deleted")


@contextmanager
def leaving_final_errors() -> Iterator[None]:
    """Leave this node's error beside $ENGINERY_HEARTBEAT where it would come again: rank 0 says only its own."""
    try:
        yield
    except EngineryError as error:
        failure = {"exit_code": error.exit_code, "code": error.code, "setting": error.setting}
        if (name := os.environ.get(VARIABLE)) and _is_final(failure):
            failure["message"] = f"{error} (on node {os.environ.get('GROUP_RANK')})"
            with suppress(OSError):  # its volume may be the very failure
                write_atomically(Path(name).with_name(FAILURE), json.dumps(failure).encode())
        raise


def _failure(own: Path) -> dict[str, Any]:
    """Return what rank 0, or else another node, has left on how it failed; no message where none has."""
    failure: dict[str, Any] = {"message": "", "exit_code": EXIT_FAILURE, "code": "", "setting": ""}
    for folder in (own / "checkpoint", own):
        with suppress(OSError, ValueError, TypeError):
            failure |= json.loads((folder / FAILURE).read_bytes())
            if _is_final(failure):
                break
    return failure


def _is_final(failure: dict[str, Any]) -> bool:
    """True if a node failed for a reason that is still there when its container starts again."""
    return failure["exit_code"] == EXIT_USER_ERROR or bool(failure["setting"])


def _format_failure(failed: JobFailed, failure: dict[str, Any]) -> EngineryError:
    """Return the reason that a node has left, or else the last lines of the pods."""
    text = f"{failure['message']} ({failed})" if failure["message"] else str(failed)
    if failed.last_words and failure["exit_code"] in (EXIT_FAILURE, EXIT_PREEMPTED):
        text += f". What the pods wrote last:\n{failed.last_words}"
    code = failure["code"]  # these may be the consequence of another node's end
    known = code if code not in ("", "unexpected", "process-lost") else failed.code
    error = EngineryError(text, code=known, setting=failure["setting"])
    error.exit_code = int(failure["exit_code"])
    return error


def _copy_result(checkpoint: Path, own: Path, output: Path) -> CheckpointManifest:
    """Copy the Checkpoint to where KFP expects it, the manifest last, and tidy up."""
    trained = load(checkpoint, CheckpointManifest, verify=ALL_FILES)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    for file in (*files, checkpoint / MANIFEST):
        copy = output / file.relative_to(checkpoint)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    load(output, CheckpointManifest, verify=ALL_FILES)
    shutil.rmtree(own, ignore_errors=True)
    return trained.manifest
