"""Damaged releases, signatures and registry manifests: each is refused with an error or a problem of ours, or is right.

    python -m benchmarks.fuzz releases --machine NAME --num-cases 10000

Bytes are damaged anywhere, JSON in its structure, too. Lists, seals and signatures are made to fit what was damaged, as
by who has the key, so that what lies behind them is read.
"""

import base64
import copy
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from components.common.contracts.digests import canonical_json
from components.common.contracts.manifests import MANIFEST, seal_of
from components.common.registry import trust
from components.common.registry.keys import signing_key
from components.common.registry.version_evaluation import load_evaluation
from enginery.release.oci import Address, _files_of
from enginery.release.verify import BOM, RECORD, SUMS, verify, write_sums
from enginery.release.writing import write_release
from tests.fuzz.images import mutate
from tests.fuzz.parsers import BATCH, judged
from tests.unit.registered import PARTS, make_chain, replace_file, reseal, write_keys

__all__ = ["BATCH", "check_batch", "originals"]
_APPROVAL = trust.approval_file("prod")
_MAX_COPIED = 10_000  # characters: the growth that counts is that of the code under test
_VALUES = (None, True, 0, -1, 1e308, 10**400, "", "sha256:", "a" * 5000, "\x1b[2J", [], {}, [[]], {"a": {}}, ["a"] * 99)


class _Release:
    """A signed release with all that lies in it, and a policy that trusts its key."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="enginery-fuzz-"))
        private, public = write_keys(self.home / "ci")
        rights = {"signs": ["verdict", "model"], "approves": ["prod"], "expires": "2999-01-01"}
        policy = {
            "environment": "prod",
            "newest_approvals": "",
            "keys": {"ci": {"public_key": public.read_text(), **rights}},
        }
        (self.home / "trust.yaml").write_text(yaml.safe_dump(policy))
        paths = make_chain(self.home, 90)
        provenance = {"code": {"commit": "", "modified": False, "version": "1"}, "digests": {}, "environments": {}}
        replace_file(paths["report"], "model_card.md", b"# m\n")
        report = replace_file(paths["report"], "report.json", json.dumps({"provenance": provenance}).encode())
        reseal(paths["verdict"], lambda record: record["inputs"].update(report=report))
        self.evaluation = load_evaluation(paths["report"], paths["verdict"])
        self.digests = {part: self.evaluation.digests[part] for part in PARTS}
        self.key = signing_key(private)
        statements = {
            trust.VERDICT: trust.sign_verdict(self.digests, True, self.key),
            _APPROVAL: trust.sign_approval(self.digests, "m", "1", "prod", 9, self.key),
        }
        self.folder = self.home / "release"
        parts = {part: paths[part] for part in PARTS}
        with self.trusted():
            write_release(parts, self.folder, name="m", statements=statements, key=private)

    @contextmanager
    def trusted(self) -> Iterator[None]:
        with mock.patch.dict(os.environ, {trust.POLICY_VARIABLE: str(self.home / "trust.yaml")}):
            yield

    def check(self, name: str, file: Path) -> list[str]:
        """The problems of the release with another content of one of its files."""
        with self._changed(self.folder / name, file):
            if name == trust.SIGNATURE:
                with self.trusted():
                    trust.check_folder("it", self.folder, say=str)
                return []
            with self._changed(self.folder / SUMS, None):
                if name != SUMS:
                    (self.folder / SUMS).write_bytes(write_sums(self.folder))
                problems = [*verify(self.folder).problems]
            if name in (trust.VERDICT, _APPROVAL):
                with self.trusted():
                    trust.check_chain("it", self.digests, trust.read_statements(self.folder), model="m", say=str)
        return problems

    def measured(self, file: Path) -> None:
        """Read predictions."""
        with self._changed(self.evaluation.report.path / "predictions.npz", file):
            self.evaluation.measured("it")

    @contextmanager
    def _changed(self, place: Path, file: Path | None) -> Iterator[None]:
        """Another content in a file's place, which then is as before."""
        before = place.read_bytes()
        try:
            if file is not None:
                shutil.copyfile(file, place)
            yield
        finally:
            place.write_bytes(before)


@cache
def _release() -> _Release:
    return _Release()


def _oci() -> bytes:
    title = "org.opencontainers.image.title"
    layers = [
        {"mediaType": "x", "digest": "sha256:" + 64 * "0", "size": 5, "annotations": {title: name}}
        for name in ("manifest.json", "m/1/model.py", "model.sig")
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": "x", "config": layers[0], "layers": layers}).encode()


@cache
def originals() -> dict[str, tuple[bytes, Callable[[Path], object]]]:
    """A file of each kind by its name, and what reads it."""
    release = _release()
    names = (
        SUMS,
        trust.SIGNATURE,
        trust.VERDICT,
        _APPROVAL,
        BOM,
        RECORD,
        "MLmodel",
        *(f"{part}/{MANIFEST}" for part in PARTS),
    )
    readers: dict[str, tuple[bytes, Callable[[Path], object]]] = {
        name: ((release.folder / name).read_bytes(), lambda file, name=name: release.check(name, file))
        for name in names
    }
    arrays = io.BytesIO()
    top, labels = np.zeros((100, 5), np.int16), np.zeros(100, np.int32)
    np.savez_compressed(arrays, int8=top, labels=labels)
    address = Address(registry="registry", repository="m")
    return readers | {
        "predictions.npz": (arrays.getvalue(), release.measured),
        "oci.json": (_oci(), lambda file: _files_of(address, file.read_bytes())),
    }


def damaged(number: int, seed: int) -> tuple[str, bytes]:
    """Case `number`: the name of one of the files, each in its turn, and what it holds now."""
    names = [*originals()]
    name, chance = names[number % len(names)], random.Random(f"{seed}:{number}")
    data = originals()[name][0]
    if name.endswith((".json", ".sig", "MLmodel")) and chance.random() < 0.6:
        return name, _with_other_values(chance, name, data)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        mutate(chance, changed, [file for file, _ in originals().values()])
    return name, bytes(changed)


def _with_other_values(chance: random.Random, name: str, data: bytes) -> bytes:
    """Valid JSON, or YAML, with some values changed, under a seal or signature that fits it."""
    try:
        return _written(chance, name, data)
    except RecursionError:  # nested too deeply for who writes it
        return b'{"a":[' * 100_000


def _written(chance: random.Random, name: str, data: bytes) -> bytes:
    record = yaml.safe_load(data) if name == "MLmodel" else json.loads(data)
    if name in (trust.VERDICT, _APPROVAL) and chance.random() < 0.7:
        statement = json.loads(base64.b64decode(record["payload"]))
        _change(chance, statement)
        envelope = Envelope(json.dumps(statement).encode(), record["payloadType"], {})
        envelope.sign(CryptoSigner(_release().key))
        return json.dumps(envelope.to_dict()).encode()
    _change(chance, record)
    if name.endswith(MANIFEST) and chance.random() < 0.7:
        try:
            return canonical_json({**record, "seal": seal_of(record)})
        except ValueError:  # it has no canonical form
            pass
    text = json.dumps(record)  # which is YAML, too
    if chance.random() < 0.1:
        text = text.replace("null", "[" * 100_000, 1)
    return text.encode()


def _change(chance: random.Random, record: Any) -> None:
    """Put other values in, leave some out, or nest them."""
    for turn in range(chance.choice((1, 1, 2, 4))):
        place: Any = record
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
                place = place[key]
                continue
            way = chance.randrange(8)
            if way == 0:
                del place[key]
            elif way == 1:
                may_be_many = turn == 0 and len(repr(place[key])) < _MAX_COPIED
                place[key] = [place[key]] * chance.choice((2, 1000 if may_be_many else 2))
            elif way == 2 and isinstance(place[key], str):
                text = place[key]
                at = chance.randrange(len(text) + 1)
                place[key] = text[:at] + chance.choice(("\0", "/", "..", "\ud800", "é", "0")) + text[at + 1 :]
            elif way == 3:
                for _ in range(chance.choice((3, 300, 700))):  # as deep as Python's JSON goes here
                    place[key] = [place[key]]
            else:
                place[key] = copy.deepcopy(chance.choice(_VALUES))
            break


def check_batch(numbers: range, seed: int) -> dict[int, str]:
    """Failures by case."""
    cases = ((number, *damaged(number, seed)) for number in numbers)
    return judged(cases, {name: read for name, (_, read) in originals().items()})
