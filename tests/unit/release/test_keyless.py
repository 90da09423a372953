"""Folders signed without a key, by the certificates of a Sigstore: a small one, which really issues and logs."""

import base64
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
import rfc8785
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from components.common.registry import trust
from components.common.registry.trust import POLICY_VARIABLE, TOKEN_VARIABLE
from tests.serving import Served, serving
from tests.unit.registered import FUTURE, Machine, refuses, write_keys
from tests.unit.release.test_release import release

IDENTITY = "https://kubernetes.io/namespaces/ml/serviceaccounts/pipeline"
ISSUER = "https://kubernetes.default.svc"
_SCT, _ISSUER = "1.3.6.1.4.1.11129.2.4.2", "1.3.6.1.4.1.57264.1.1"  # RFC 6962; Fulcio's extension


class Sigstore(Served):
    """A certificate authority that logs certificates (RFC 6962), and a transparency log with one entry at a time."""

    def __init__(self) -> None:
        super().__init__(endpoint="http://127.0.0.1:1")
        self.authority, self.certificates, self.log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.root = self._certificate(self.authority.public_key(), "root", ca=True).sign(
            self.authority, hashes.SHA256()
        )

    def _certificate(self, key: Any, name: str, *, ca: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
        builder = x509.CertificateBuilder(issuer, x509.Name([]) if not ca else issuer, key, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(minutes=1)).not_valid_after(now + timedelta(minutes=9))
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key())
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only"), False,
        )  # fmt: skip
        usage |= {"digital_signature": not ca, "key_cert_sign": ca, "crl_sign": ca}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True).add_extension(own, critical=False)
        if ca:
            identifier = x509.SubjectKeyIdentifier.from_public_key(key)
            builder = builder.add_extension(identifier, critical=False)
            return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)])
        issued = x509.UnrecognizedExtension(x509.ObjectIdentifier(_ISSUER), ISSUER.encode())
        code = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
        return builder.add_extension(names, True).add_extension(issued, False).add_extension(code, False)

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        """As Fulcio, Rekor, or the issuer of tokens."""
        if method == "POST":
            return 201, self._record(body) if path == "/api/v1/log/entries" else self._issue(body)
        return 200, dict.fromkeys(("issuer", "authorization_endpoint", "token_endpoint"), self.endpoint)

    def _issue(self, request: dict[str, Any]) -> dict[str, Any]:
        """A certificate for the token's subject, with a signed time stamp of its log."""
        (token,) = filter(None, self.tokens)
        self.tokens.clear()
        subject = jwt.decode(token.removeprefix("Bearer "), options={"verify_signature": False})["sub"]
        csr = x509.load_pem_x509_csr(base64.b64decode(request["certificateSigningRequest"]))
        builder = self._certificate(csr.public_key(), subject, ca=False)
        before = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        milliseconds, issuer = int(time.time() * 1000), digest(spki(self.authority))
        entry = struct.pack("!BBQH", 0, 0, milliseconds, 1) + issuer + len(before).to_bytes(3, "big") + before + b"\0\0"
        signature = self.certificates.sign(entry, ec.ECDSA(hashes.SHA256()))
        stamp = struct.pack("!B32sQH", 0, digest(spki(self.certificates)), milliseconds, 0)
        stamp += struct.pack("!BBH", 4, 3, len(signature)) + signature
        stamp = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        octets = b"\x04" + (bytes([len(stamp)]) if len(stamp) < 128 else bytes([0x81, len(stamp)])) + stamp
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(_SCT), octets), critical=False)
        leaf = builder.sign(self.authority, hashes.SHA256())
        pems = [entry.public_bytes(Encoding.PEM).decode() for entry in (leaf, self.root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": pems}}}

    def _record(self, request: dict[str, Any]) -> dict[str, Any]:
        """A log of this entry alone, its signed root, and the promise that it is in it."""
        proposed = request["spec"]["proposedContent"]
        envelope = json.loads(proposed["envelope"])
        body: dict[str, Any] = {"apiVersion": "0.0.1", "kind": "dsse"}
        body["spec"] = {
            "envelopeHash": {"algorithm": "sha256", "value": digest(proposed["envelope"].encode()).hex()},
            "payloadHash": {"algorithm": "sha256", "value": digest(base64.b64decode(envelope["payload"])).hex()},
            "signatures": [{"signature": envelope["signatures"][0]["sig"], "verifier": proposed["verifiers"][0]}],
        }
        content, key_id = rfc8785.dumps(body), digest(spki(self.log))
        root = digest(b"\0" + content)
        note = f"log\n1\n{base64.b64encode(root).decode()}\n"
        signature = key_id[:4] + self.log.sign(note.encode(), ec.ECDSA(hashes.SHA256()))
        proof = {"logIndex": 0, "treeSize": 1, "rootHash": root.hex(), "hashes": []}
        entry = {"body": base64.b64encode(content).decode(), "integratedTime": int(time.time()), "logIndex": 0}
        promised = rfc8785.dumps({**entry, "logID": key_id.hex()})
        promise = base64.b64encode(self.log.sign(promised, ec.ECDSA(hashes.SHA256()))).decode()
        proof["checkpoint"] = f"{note}\n\u2014 log {base64.b64encode(signature).decode()}\n"
        verification = {"inclusionProof": proof, "signedEntryTimestamp": promise}
        return {"00": {**entry, "logID": key_id.hex(), "verification": verification}}

    def trust_config(self) -> dict[str, Any]:
        """The file that its operator hands out."""

        def known(key: Any) -> dict[str, Any]:
            public = {"rawBytes": base64.b64encode(spki(key)).decode(), "keyDetails": "PKIX_ECDSA_P256_SHA_256"}
            public["validFor"] = {"start": "2020-01-01T00:00:00Z"}
            log_id = {"keyId": base64.b64encode(digest(spki(key))).decode()}
            return {"baseUrl": self.endpoint, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": log_id}

        url = self.endpoint
        root = base64.b64encode(self.root.public_bytes(Encoding.DER)).decode()
        authority = {"subject": {"organization": "tests", "commonName": "root"}, "uri": url}
        authority |= {
            "certChain": {"certificates": [{"rawBytes": root}]},
            "validFor": {"start": "2020-01-01T00:00:00Z"},
        }
        trusted = {"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}
        trusted |= {"tlogs": [known(self.log)], "ctlogs": [known(self.certificates)]}
        trusted["certificateAuthorities"] = [authority]
        service = [{"url": url, "majorApiVersion": 1, "operator": "o", "validFor": {"start": "2020-01-01T00:00:00Z"}}]
        signing = {"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json", "tsaUrls": []}
        signing |= dict.fromkeys(("caUrls", "oidcUrls", "rekorTlogUrls"), service)
        signing["rekorTlogConfig"] = {"selector": "ANY"}
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        return {"mediaType": kind, "trustedRoot": trusted, "signingConfig": signing}


def spki(key: Any) -> bytes:
    """A public key, in DER."""
    return bytes(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.fixture(scope="module")
def sigstore() -> Iterator[Sigstore]:
    with serving(Sigstore()) as services:
        yield services


@pytest.fixture
def keyless(sigstore: Sigstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trust configuration, on a pod whose service account is the pipeline's."""
    file = tmp_path / "sigstore.json"
    file.write_text(json.dumps(sigstore.trust_config()))
    monkeypatch.setenv(TOKEN_VARIABLE, token(IDENTITY))
    return file


def token(subject: str, seconds: float = 600, audience: str = "sigstore") -> str:
    """As a cluster projects it into a pod."""
    claims = {"sub": subject, "iss": ISSUER, "aud": audience, "iat": int(time.time()), "exp": time.time() + seconds}
    return jwt.encode(claims, "any key: the Sigstore checks it, not the client", algorithm="HS256")


def policy(folder: Path, monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    """The operator's, which trusts the pipeline's identity. `other`: what is different; {} is the policy's folder."""
    entry = {"identity": IDENTITY, "issuer": ISSUER, "sigstore": "{}/sigstore.json", "expires": FUTURE} | other
    entry["sigstore"] = entry["sigstore"].format(folder)
    file = folder / "trust.yaml"
    file.write_text(yaml.safe_dump({"identities": {"pipeline": entry}}))
    monkeypatch.setenv(POLICY_VARIABLE, str(file))


def test_a_folder_is_signed_without_a_key(proved: Any, keyless: Path, tmp_path: Path, monkeypatch) -> None:
    """The token is where a pod's projected volume has it."""
    monkeypatch.setattr(trust, "TOKEN_FILE", tmp_path / "token")
    trust.TOKEN_FILE.write_text(os.environ[TOKEN_VARIABLE] + "\n")
    monkeypatch.delenv(TOKEN_VARIABLE)
    out = tmp_path / "out"
    release(out, proved.parts, "--key", keyless)
    assert json.loads((out / "release.json").read_text())["key_fingerprint"] == ""
    policy(tmp_path, monkeypatch)
    assert trust.check_folder("it", out) == "pipeline"

    (out / "MODEL_CARD.md").write_text("forged")
    with refuses("signature-mismatch"):
        trust.check_folder("it", out)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"identity": "https://kubernetes.io/namespaces/other/serviceaccounts/pipeline"}, "signature-mismatch"),
        ({"issuer": "https://accounts.example.com"}, "signature-mismatch"),
        ({"expires": "2020-01-01"}, "key-expired"),
        ({"sigstore": "{}/other.json"}, "signature-mismatch"),
        ({"sigstore": "{}/missing.json"}, "trust-config-unreadable"),
        ({"sigstore": "{}"}, "trust-config-unreadable"),
        ({"sigstore": "{}/folder/model"}, "trust-config-invalid"),
        ({"sigstore": "{}/no_log.json"}, "trust-config-invalid"),
        ({"sigstore": "sigstore.json"}, "policy-invalid"),  # of whoever can fill the working directory
        (None, "key-unknown"),
    ],
)
def test_signatures_of_others(keyless: Path, tmp_path, monkeypatch, other: dict[str, str] | None, code: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model").write_text("weights")
    trust.sign_folder(folder, keyless)
    other_config = Sigstore().trust_config()
    (tmp_path / "other.json").write_text(json.dumps(other_config))
    other_config["trustedRoot"]["tlogs"] = []
    (tmp_path / "no_log.json").write_text(json.dumps(other_config))
    monkeypatch.chdir(tmp_path)
    policy(tmp_path, monkeypatch, **other or {})
    if other is None:
        (tmp_path / "trust.yaml").write_text("keys: {}\n")
    with refuses(code):
        trust.check_folder("it", folder)


@pytest.mark.parametrize("first", ["old", "new"])
def test_expired_entries_hide_no_others(machine: Machine, keyless: Path, tmp_path, monkeypatch, first: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model").write_text("weights")
    signers = {"identities": {"identity": IDENTITY, "issuer": ISSUER, "sigstore": str(keyless)}}
    signers["keys"] = {"public_key": machine.keys["ci"][1].read_text(), "signs": ["model"]}
    for kind, signer in (("identities", keyless), ("keys", machine.key("ci"))):
        trust.sign_folder(tmp_path / "folder", signer)
        dates = {"old": "2020-01-01", "new": FUTURE}
        entries = {name: {**signers[kind], "expires": dates[name]} for name in sorted(dates, key=lambda n: n != first)}
        (tmp_path / "trust.yaml").write_text(yaml.safe_dump({kind: entries}, sort_keys=False))
        monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "trust.yaml"))
        assert trust.check_folder("it", tmp_path / "folder") == "new"


@dataclass(frozen=True)
class Of:
    """The same field of another's signature."""

    signer: str


LOG = "verificationMaterial.tlogEntries"
CERTIFICATE, PUBLIC_KEY = "verificationMaterial.certificate", "verificationMaterial.publicKey"


@pytest.fixture(scope="module")
def signed(sigstore: Sigstore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Signatures of the same folder by two whom the policy in `policy` trusts, and by two others."""
    root = tmp_path_factory.mktemp("signed")
    signers = {name: write_keys(root / name)[0] for name in ("ci", "stranger")}
    signers |= dict.fromkeys(("pipeline", "other"), root / "sigstore.json")
    (root / "sigstore.json").write_text(json.dumps(sigstore.trust_config()))
    (folder := root / "folder").mkdir()
    (folder / "model").write_text("weights")
    found = {}
    for name, signer in signers.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_VARIABLE, token(IDENTITY if name == "pipeline" else "https://other.example.com"))
            trust.sign_folder(folder, signer)
        found[name] = (folder / trust.SIGNATURE).read_text()
        (folder / trust.SIGNATURE).unlink()
    identity = {"identity": IDENTITY, "issuer": ISSUER, "sigstore": str(root / "sigstore.json"), "expires": FUTURE}
    key = {"public_key": (root / "ci.pub").read_text(), "signs": ["model"], "expires": FUTURE}
    return {**found, "policy": yaml.safe_dump({"keys": {"ci": key}, "identities": {"pipeline": identity}})}


@pytest.fixture
def folder(signed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, on a machine with that policy and without a network."""

    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("the network was used")

    for module, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")):
        monkeypatch.setattr(module, name, refuse)
    (tmp_path / "trust.yaml").write_text(signed["policy"])
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "trust.yaml"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model").write_text("weights")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("signer", "field", "value"),
    [
        ("pipeline", PUBLIC_KEY, Of("ci")),
        ("stranger", PUBLIC_KEY, Of("ci")),
        ("stranger", f"{PUBLIC_KEY}.hint", ""),
        ("stranger", CERTIFICATE, Of("pipeline")),
        ("stranger", CERTIFICATE, {}),
        ("stranger", "verificationMaterial", Of("pipeline")),
        ("other", CERTIFICATE, Of("pipeline")),
        ("other", "verificationMaterial", Of("pipeline")),
        ("pipeline", LOG, []),
        ("pipeline", LOG, None),
        ("pipeline", LOG, Of("other")),
        ("pipeline", f"{LOG}.0.inclusionProof", None),
        ("pipeline", f"{LOG}.0.inclusionPromise", None),
        ("pipeline", f"{LOG}.0.integratedTime", "1"),
        ("pipeline", "dsseEnvelope.payloadType", "text/plain"),
        ("ci", "dsseEnvelope.payloadType", "text/plain"),
        ("pipeline", "dsseEnvelope.signatures", Of("other")),
        ("pipeline", "dsseEnvelope.signatures", []),
        ("ci", "dsseEnvelope.signatures", []),
        ("ci", "dsseEnvelope.signatures.0.sig", Of("stranger")),  # under the name of the key
        ("pipeline", "dsse_envelope", {}),
        ("pipeline", "mediaType", "application/vnd.dev.sigstore.bundle+json;version=9"),
    ],
)
def test_changed_signatures(folder: Path, signed: dict[str, str], signer: str, field: str, value: Any) -> None:
    """`value`: None takes the field away."""
    *parents, last = field.split(".")

    def parent(of: str) -> tuple[Any, Any]:
        found = whole = json.loads(signed[of])
        for name in parents:
            found = found[int(name) if name.isdigit() else name]
        return whole, found

    whole, changed = parent(signer)
    if value is None:
        del changed[last]
    else:
        changed[last] = parent(value.signer)[1][last] if isinstance(value, Of) else value
    (folder / trust.SIGNATURE).write_text(json.dumps(whole))
    with refuses("signature-mismatch"):
        trust.check_folder("it", folder)
    key = yaml.safe_load(signed["policy"])["keys"]["ci"]["public_key"]
    assert "model.sig" in trust.folder_problem(folder, key)


@pytest.mark.parametrize("signer", ["pipeline", "ci"])
def test_added_files(folder: Path, signed: dict[str, str], signer: str) -> None:
    (folder / trust.SIGNATURE).write_text(signed[signer])
    assert trust.check_folder("it", folder) == signer
    added = (
        "model.py",
        ".git/config",
        ".gitignore",
        "sub/model.sig",
        "sub/verdict.dsse.json",
        "a.dsse.json/model.py",
        "a\nok",
    )
    for name in added:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("code")
        with refuses("signature-mismatch") as refusal:
            trust.check_folder("it", folder)
        assert "\n" not in str(refusal.value)
        file.unlink()
    (folder / "a.dsse.json").rmdir()
    for name in ("link", "b.dsse.json", "sub/folder"):
        (folder / name).symlink_to("/etc", target_is_directory=True)
        with refuses("signature-mismatch"):
            trust.check_folder("it", folder)
        (folder / name).unlink()
    os.mkfifo(folder / "fifo")
    with refuses("signature-mismatch"):
        trust.check_folder("it", folder)


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_token_s_file_that_can_not_be_read(keyless: Path, tmp_path: Path, monkeypatch, content: bytes | None) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.setattr(trust, "TOKEN_FILE", tmp_path / "token")
    trust.TOKEN_FILE.mkdir() if content is None else trust.TOKEN_FILE.write_bytes(content)
    with refuses("token-unreadable"):
        trust.sign_folder(tmp_path, keyless)


@pytest.mark.parametrize(
    ("service", "shown"),
    [("caUrls", "500 Server Error"), ("rekorTlogUrls", r"no\x1b[2J ...")],  # the first's error has no words
)
def test_what_the_services_answer_is_shown(keyless: Path, tmp_path: Path, service: str, shown: str) -> None:
    message = {"code": 500, "message": "no\x1b[2J " + 100_000 * "x"}
    with serving(Served(answers=lambda *_: (500, message))) as services:
        config = json.loads(keyless.read_text())
        config["signingConfig"][service] = [{**config["signingConfig"][service][0], "url": services.endpoint}]
        keyless.write_text(json.dumps(config))
        with refuses("keyless-signing-failed") as refusal:
            trust.sign_folder(tmp_path, keyless)
    text = str(refusal.value)
    assert (shown in text, len(text) < 1000) == (True, True), text


@pytest.mark.parametrize(
    ("content", "identity", "code"),
    [
        ('{"mediaType": "other"}', IDENTITY, "trust-config-invalid"),
        ("{", IDENTITY, "trust-config-invalid"),
        ("", token(IDENTITY, seconds=-60), "keyless-signing-failed"),
        ("", token(IDENTITY, audience="other"), "keyless-signing-failed"),
        ("", "no token", "keyless-signing-failed"),
    ],
)
def test_what_can_not_sign(
    proved: Any, keyless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, identity: str, code: str
) -> None:
    keyless.write_text(content or keyless.read_text())
    monkeypatch.setenv(TOKEN_VARIABLE, identity)
    with refuses(code):
        release(tmp_path / "out", proved.parts, "--key", keyless)
    assert not (tmp_path / "out").exists()
