"""Signed statements and folders that vouch for a model, and the operator's policy of whose signature counts.

Statements are in-toto's, in DSSE envelopes: the gate's verdict on a bundle, the approval of a version for one
environment, and the record of a challenger beside the champion. Folders are signed by OpenSSF's model-signing. The
policy lies on the machine, never with the model:

    environment: production
    newest_approvals: /var/lib/enginery/newest.json
    keys:
      ci: {public_key: "-----BEGIN PUBLIC KEY-----...", signs: [verdict, model], expires: 2027-06-30}
      board: {public_key: "...", approves: [production], expires: 2027-06-30}
    identities:
      pipeline: {identity: SUBJECT, issuer: https://..., sigstore: /etc/enginery/trust/sigstore.json,
                 expires: 2027-06-30}
"""

import base64
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, field_validator, model_validator

from components.common.contracts.digests import canonical_json
from components.common.contracts.environment import utc_now
from components.common.contracts.errors import EngineryError, UserError, shortened, shown
from components.common.contracts.manifests import first_problem, write_atomically
from components.common.contracts.records import Record
from components.common.registry.keys import (
    KEY_VARIABLE,
    PASSPHRASE_VARIABLE,
    key_hint,
    load_public_key,
    private_key,
    read_key,
)

POLICY_VARIABLE = "ENGINERY_TRUST_POLICY"
DEFAULT_POLICY = Path("/etc/enginery/trust.yaml")
TOKEN_VARIABLE = "SIGSTORE_ID_TOKEN"  # noqa: S105  # identity by which folders are signed without a key, as for cosign
TOKEN_FILE = Path("/var/run/sigstore/cosign/oidc-token")  # where cosign reads it, too: a projected volume
SIGNATURE = "model.sig"  # of a folder, by model-signing
VERDICT = "verdict.dsse.json"
SHADOW = "shadow.dsse.json"
STATEMENTS = "*.dsse.json"  # beside the artifacts: in a version, a release and a model repository
MAX_SIGNATURE_BYTES = 16 << 20
_MAX_STATEMENT_BYTES, _MAX_STATEMENTS = 1 << 16, 100
_IN_TOTO = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATES = {kind: f"https://enginery.dev/{kind}/v1" for kind in ("verdict", "approval", "shadow")}
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_CLOCKS_DIFFER = timedelta(minutes=5)  # at most, of the approver's machine and this one

Kind = Literal["verdict", "approval", "shadow"]
Right = Literal["verdict", "model", "approval", "shadow"]


def approval_file(environment: str) -> str:
    """Return the name of the file with the approval for an environment."""
    return f"approval-{environment}.dsse.json"


def _absolute(file: Path) -> Path:
    if not file.is_absolute():
        raise ValueError(f"{file} must be an absolute path: others can fill the folder that a command runs in")
    return file


class TrustedKey(Record):
    """A public key, and what its owner may sign."""

    public_key: str = Field(description="ECDSA P-256, in PEM.")
    signs: tuple[Literal["verdict", "model", "shadow"], ...] = Field(
        (), description="The gate's verdicts; folders of models; records of `enginery shadow`."
    )
    approves: tuple[str, ...] = Field((), description="Environments for which it may approve versions.")
    expires: date = Field(description="The day from which on nothing counts that it signed, whenever that was.")

    @field_validator("public_key")
    @classmethod
    def _check_key(cls, text: str) -> str:
        load_public_key(text.encode(), "public_key")
        return text


class TrustedIdentity(Record):
    """An identity that signs folders of models without a key, by certificates of a Sigstore."""

    identity: str = Field(min_length=1, description="Subject of the certificate: a URI or mail address.")
    issuer: str = Field(min_length=1, description="Address of the OpenID Connect issuer that vouches for it.")
    sigstore: Annotated[Path, AfterValidator(_absolute)] = Field(
        description="File with the Sigstore's client trust configuration, in JSON."
    )
    expires: date = Field(description="The day from which on nothing counts that it signed, whenever that was.")


_Signer = TypeVar("_Signer", TrustedKey, TrustedIdentity)


class TrustPolicy(Record):
    """Whose signatures count on this machine."""

    environment: str = Field(
        "", pattern=r"^[\w-]*$", description="What this machine is part of; empty where nobody need approve a version."
    )
    newest_approvals: str = Field(
        "",
        description="File that this machine keeps of the newest approval of each model: an older one is refused then. "
        "Empty where versions are pinned by digest; an environment needs one or the other said.",
    )
    keys: dict[str, TrustedKey] = Field({}, description="By name.")
    identities: dict[str, TrustedIdentity] = Field({}, description="By name.")

    @field_validator("newest_approvals")
    @classmethod
    def _check_file(cls, file: str) -> str:
        return file and str(_absolute(Path(file)))

    @field_validator("keys", "identities")
    @classmethod
    def _sort(cls, signers: dict[str, _Signer]) -> dict[str, _Signer]:
        """Put the entry that expires last before others of the same signer."""
        return dict(sorted(signers.items(), key=lambda item: item[1].expires, reverse=True))

    @model_validator(mode="after")
    def _check_downgrades(self) -> Self:
        if self.environment and "newest_approvals" not in self.model_fields_set:
            raise ValueError(
                f"nothing keeps an older approved version out of {self.environment}: set newest_approvals to a file "
                'that this machine can write, or to "" where versions are pinned by digest'
            )
        return self


def find_policy() -> TrustPolicy | None:
    """The machine's policy; None where there is none.

    Raises:
        UserError: it can't be read. Nothing is trusted then.
    """
    named = os.environ.get(POLICY_VARIABLE)
    file = Path(named) if named else DEFAULT_POLICY
    if not named and not os.path.lexists(file):  # a link that leads nowhere is no leave
        return None
    try:
        return TrustPolicy.model_validate(yaml.safe_load(_absolute(file).read_text(encoding="utf-8")))
    except OSError as error:
        message = f"can't read the trust policy {file}: {error.strerror}; correct {POLICY_VARIABLE}"
        raise UserError(message, code="policy-unreadable", setting=POLICY_VARIABLE) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        message = f"the trust policy {file} is not valid: {problem}. docs/security.md describes it"
        raise UserError(message, code="policy-invalid", setting=POLICY_VARIABLE) from None


def to_stderr(text: str) -> None:
    """Show a text beside what a command answers."""
    print(shown(text), file=sys.stderr)


def check_chain(
    what: str,
    digests: Mapping[str, str],
    statements: Mapping[str, bytes],
    *,
    environment: str | None = None,
    model: str = "",
    version: str = "",
    say: Callable[[str], None] = to_stderr,
) -> None:
    """Refuse what nobody whom the policy names has vouched for; without a policy say that nobody does.

    Args:
        what: it is, for people.
        digests: of the artifacts as they were read: "bundle", and "report" and "verdict" where they are at hand.
        statements: the envelopes that lie with it, by file name.
        environment: that it is for; None for the machine's own, "" for none.
        model: name of the registered model; empty where it is not known.
        version: its number; empty where it is not known.
        say: called with a text if there is no policy.

    Raises:
        EngineryError: a statement is missing, forged, for something else, of a key without the right or expired.
    """
    policy = find_policy()
    if policy is None:
        say(_nobody(what))
        return
    if "bundle" not in digests:
        raise _refusal(what, "its manifest names no bundle, so no verdict and no approval is on it", "no-bundle")
    predicate = _checked(policy, what, statements, VERDICT, "verdict", "", digests)
    if predicate.get("passed") is not True:
        raise _refusal(what, "the signed verdict on it is no pass", "verdict-not-passed")
    environment = policy.environment if environment is None else environment
    if environment:
        approval = _checked_approval(
            policy, what, statements, environment, digests, {"model": model, "version": version}
        )
        _check_newest(policy, what, f"{environment}/{approval.get('model')}", str(approval.get("approved")))


def check_approval(
    what: str, statement: bytes, environment: str, digests: Mapping[str, str], *, model: str, version: str
) -> None:
    """Refuse an approval that this machine's policy does not take; without a policy none is refused.

    Older ones than the newest that was seen are not: nothing is loaded here.

    Raises:
        EngineryError: see `check_chain`.
    """
    policy, statements = find_policy(), {approval_file(environment): statement}
    if policy is not None:
        _checked_approval(policy, what, statements, environment, digests, {"model": model, "version": version})


def _checked_approval(
    policy: TrustPolicy,
    what: str,
    statements: Mapping[str, bytes],
    environment: str,
    digests: Mapping[str, str],
    subject: Mapping[str, str],
) -> dict[str, Any]:
    """The predicate of an approval that counts now. `subject`: model and version, empty where they are not known."""
    predicate = _checked(policy, what, statements, approval_file(environment), "approval", environment, digests)
    if predicate.get("environment") != environment:
        raise _refusal(
            what,
            f"its approval is for {predicate.get('environment')}, and this is {environment}. " + _APPROVE,
            "approval-other-environment",
        )
    for name, due in subject.items():
        if due and predicate.get(name) != due:
            text = f"its approval is of the {name} {predicate.get(name)}. {_APPROVE}"
            raise _refusal(what, text, f"approval-other-{name}")
    expires, approved = (_time_of(predicate.get(name)) for name in ("expires", "approved"))
    if expires is None or approved is None:
        raise _refusal(what, f"its approval does not say from when to when it counts. {_APPROVE}", "approval-expired")
    if expires < datetime.fromisoformat(utc_now()):
        raise _refusal(what, f"its approval ended {predicate.get('expires')}. {_APPROVE}", "approval-expired")
    if approved > datetime.fromisoformat(utc_now()) + _CLOCKS_DIFFER:  # else every later one would be older than this
        raise _refusal(
            what,
            f"it was approved {predicate.get('approved')}, and here it is {utc_now()}. Set the clock that is wrong, "
            "and if that was the approver's, approve it again",
            "approval-in-future",
        )
    return predicate


def check_shadow(what: str, digests: Mapping[str, str], statements: Mapping[str, bytes]) -> None:
    """Refuse a record of `enginery shadow` that no key of the policy signed; without a policy say that nobody did.

    `digests`: of the record ("shadow") and of the repositories "champion" and "challenger".

    Raises:
        EngineryError: see `check_chain`.
    """
    policy = find_policy()
    if policy is None:
        to_stderr(_nobody(what))
    else:
        _checked(policy, what, statements, SHADOW, "shadow", "", digests)


def _time_of(value: object) -> datetime | None:
    """A statement's time; None where it is missing, or is no time with its zone."""
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is not None and time.tzinfo is not None else None


_APPROVE = "Have it approved: enginery approve NAME/VERSION --env ENV --key FILE"


def _refusal(what: str, why: str, code: str) -> EngineryError:
    return EngineryError(f"{what} is refused: {why}", code=code)


def _nobody(what: str) -> str:
    return (
        f"{what}: nobody vouches for it, since this machine has no trust policy ({POLICY_VARIABLE}, {DEFAULT_POLICY}); "
        "docs/security.md says what that means"
    )


def _checked(
    policy: TrustPolicy,
    what: str,
    statements: Mapping[str, bytes],
    file: str,
    kind: Kind,
    environment: str,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """The predicate of a statement, whose signature and subjects are right."""
    if file not in statements:
        missing, fix = {
            "verdict": ("the gate signed no verdict", f"Run the gate with {KEY_VARIABLE} set"),
            "approval": (f"nobody approved it for {environment}", _APPROVE),
            "shadow": ("it is not signed", "Write it again with `enginery shadow --key FILE`"),
        }[kind]
        raise _refusal(what, f"{missing} ({file} is not there). {fix}", f"no-{kind}")
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error
    from securesystemslib.signer import SSlibKey

    try:
        envelope = Envelope.from_dict(json.loads(statements[file]))
        statement = json.loads(envelope.payload)
        subjects = {entry["name"]: f"sha256:{entry['digest']['sha256']}" for entry in statement["subject"]}
        predicate = dict(statement["predicate"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Error):
        raise _refusal(what, f"its {file} is no signed statement, or is damaged", "statement-damaged") from None
    known = {
        name: SSlibKey.from_crypto(load_public_key(key.public_key.encode(), name)) for name, key in policy.keys.items()
    }
    name = next((name for name, key in known.items() if key.keyid in envelope.signatures), "")
    _check_right(policy, what, name, kind, environment)
    try:
        envelope.verify([known[name]], 1)
    except (Error, AttributeError, TypeError, ValueError):  # of a payload type that is no text, too
        raise _refusal(what, f"{file} was changed after {name} had signed it", "statement-changed") from None
    types = (envelope.payload_type, statement.get("_type"), statement.get("predicateType"))
    if types != (_IN_TOTO, _STATEMENT_TYPE, _PREDICATES[kind]):
        raise _refusal(what, f"{file} is no statement on a {kind}", "statement-other-kind")
    for part, digest in digests.items():
        if subjects.get(part) != digest:
            raise _refusal(
                what,
                f"{file} is about the {part} {subjects.get(part, 'of no digest')}, and this is {digest}",
                "statement-other-digest",
            )
    return predicate


def _check_right(policy: TrustPolicy, what: str, name: str, right: Right, environment: str = "") -> None:
    """Refuse a key that may not sign that now. `name`: of the key; empty for one that the policy does not name."""
    if not name:
        raise _refusal(
            what, f"no key of the trust policy signed its {right}. Sign with one that it names", "key-unknown"
        )
    key = policy.keys[name]
    if not (environment in key.approves if right == "approval" else right in key.signs):
        may = f"approve for {environment}" if right == "approval" else f"sign a {right}"
        raise _refusal(
            what, f"by the trust policy the key {name} may not {may}. Sign with one that may", "key-without-right"
        )
    _check_expiry(what, f"the key {name}", right, key.expires)


def _check_expiry(what: str, signer: str, right: Right, expires: date) -> None:
    if datetime.now(UTC).date() >= expires:
        raise _refusal(
            what, f"{signer} that signed its {right} expired on {expires}. Sign again with a new one", "key-expired"
        )


def _check_newest(policy: TrustPolicy, what: str, subject: str, approved: str) -> None:
    """Refuse an approval that is older than one that was seen: an older version, put back by somebody."""
    if not policy.newest_approvals:
        return
    file = Path(policy.newest_approvals)
    try:
        with file.with_name(f".{file.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two at once, the older would be written last
            seen = TypeAdapter(dict[str, str]).validate_json(file.read_bytes()) if file.exists() else {}
            if approved < seen.get(subject, ""):
                raise _refusal(
                    what,
                    f"it was approved {approved}, and for {subject} an approval of {seen[subject]} was "
                    "seen already: this is an older version. To go back to it, approve it again",
                    "approval-older",
                )
            if seen.get(subject) != approved:
                write_atomically(file, json.dumps({**seen, subject: approved}, indent=1).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UserError(
            f"can't keep the newest approvals in {file}: {_reason(error)}; correct the trust policy",
            code="approvals-unwritable",
        ) from None


def check_folder(what: str, folder: Path, *, say: Callable[[str], None] = to_stderr) -> str:
    """Refuse a folder that nobody of the policy signed as it is; without a policy say that nobody vouches for it.

    Returns:
        The name of the key or identity; empty without a policy.

    Raises:
        EngineryError: it is unsigned, was changed, or was signed by somebody without the right or expired.
    """
    policy = find_policy()
    if policy is None:
        say(_nobody(what))
        return ""
    if not _is_plain(folder / SIGNATURE):
        raise _refusal(what, f"it is not signed ({SIGNATURE} is not there). Write it again with --key", "not-signed")
    try:
        material = json.loads(_read_signature(folder))["verificationMaterial"]
        hint = "" if "certificate" in material else material["publicKey"]["hint"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refusal(what, f"its {SIGNATURE} is no signature, or is damaged", "signature-damaged") from None
    if not hint:
        return _check_identity(policy, what, folder)
    name = next((name for name, key in policy.keys.items() if key_hint(key.public_key) == hint), "")
    _check_right(policy, what, name, "model")
    if problem := folder_problem(folder, policy.keys[name].public_key):
        raise _refusal(what, problem, "signature-mismatch")
    return name


def _check_identity(policy: TrustPolicy, what: str, folder: Path) -> str:
    """Return the name of the identity that signed a folder without a key, or refuse the folder."""
    problems = ["the trust policy names no identity that may sign without a key"]
    for name, identity in policy.identities.items():
        _check_trust_config(identity.sigstore, POLICY_VARIABLE)
        if problem := folder_problem(folder, identity):
            problems.append(f"{problem} (identity {name})")
            continue
        _check_expiry(what, f"the identity {name}", "model", identity.expires)
        return name
    raise _refusal(what, "; ".join(problems[1:] or problems), "signature-mismatch" if problems[1:] else "key-unknown")


def folder_problem(folder: Path, signer: str | TrustedIdentity) -> str:
    """Return the problem of a folder's signature by a public key in PEM or an identity; empty if there is none."""
    from tempfile import TemporaryDirectory

    from cryptography.exceptions import InvalidSignature
    from model_signing.verifying import Config

    config = Config().set_ignore_unsigned_files(True)
    with TemporaryDirectory() as temporary:
        pem, copy = Path(temporary, "key.pub"), Path(temporary, SIGNATURE)
        try:
            data = _read_signature(folder)
            copy.write_bytes(data)  # of which the signature and then the list of files are read
            if isinstance(signer, TrustedIdentity):
                config.use_sigstore_verifier(
                    identity=signer.identity, oidc_issuer=signer.issuer, trust_config=signer.sigstore
                )
            else:
                pem.write_text(signer)
                config.use_elliptic_key_verifier(public_key=pem)
            config.verify(folder, copy)
        except InvalidSignature:
            return f"{SIGNATURE} is no signature by that key"
        except Exception as error:  # model-signing and sigstore have many kinds for a damaged file
            files = re.findall(r"Hash mismatch for \\*'(.*?)\\*'", str(error))  # the rest of that message is bytes
            if not files:
                return f"{SIGNATURE} is by another signer, or damaged: {_reason(error)}"
            return f"{SIGNATURE} does not fit {shortened(', '.join(files[:5]))}"
    # Statements may come later; anything else could be what is loaded, beside what was signed for something else.
    try:
        envelope = json.loads(data)["dsseEnvelope"]
        statement = json.loads(base64.b64decode(envelope["payload"]))
        signed = {entry["name"] for entry in statement["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError):  # such as other names of fields, which model-signing takes
        return f"{SIGNATURE} is damaged. Sign the folder again"
    free = {folder / SIGNATURE, *filter(_is_plain, folder.glob(STATEMENTS))}
    others = (
        file for file in sorted(folder.rglob("*")) if file not in free and (file.is_symlink() or not file.is_dir())
    )
    added = [name for file in others if (name := file.relative_to(folder).as_posix()) not in signed]
    return f"{SIGNATURE} does not cover {shortened(', '.join(added[:5]))}" if added else ""


def _read_signature(folder: Path) -> bytes:
    with (folder / SIGNATURE).open("rb") as file:
        data = file.read(MAX_SIGNATURE_BYTES + 1)
    if len(data) > MAX_SIGNATURE_BYTES:
        raise ValueError(f"what has more than {MAX_SIGNATURE_BYTES:,} bytes")
    return data


def sign_folder(folder: Path, signer: Path) -> None:
    """Sign every file of a folder, by a private key or by a Sigstore's trust configuration. The signature lies in it.

    Raises:
        UserError: see `check_signer`.
        EngineryError: the Sigstore can't be reached, or refuses this identity.
    """
    from model_signing import hashing, signing

    hashes = hashing.Config().set_ignored_paths(paths=[folder / SIGNATURE], ignore_git_paths=False)
    config = signing.Config().set_hashing_config(hashes)
    if check_signer(signer) is not None:
        passphrase = os.environ.get(PASSPHRASE_VARIABLE)
        config.use_elliptic_key_signer(private_key=signer, password=passphrase and passphrase.encode())
        config.sign(folder, folder / SIGNATURE)
        return
    token = _identity_token()
    try:
        # Without a token it asks for one on the terminal, and fails where there is none.
        config.use_sigstore_signer(
            trust_config=signer, identity_token=token, use_ambient_credentials=True, force_oob=True
        )
        config.sign(folder, folder / SIGNATURE)
    except Exception as error:  # of sigstore, its HTTP client, the token's parser, and the services' answers
        raise EngineryError(
            f"the Sigstore of {signer} did not sign: {_reason(error)}. Check its services, and the identity's token in "
            f"{TOKEN_VARIABLE} or {TOKEN_FILE}",
            code="keyless-signing-failed",
            setting=TOKEN_VARIABLE,
        ) from error


def check_signer(file: Path) -> Any:
    """The private key in a file, see `signing_key`; None where the file is a Sigstore's client trust configuration.

    Raises:
        UserError: it is neither.
    """
    data = read_key(file)
    if not data.lstrip().startswith(b"{"):
        return private_key(data, str(file))
    _check_trust_config(file, "--key")
    return None


def _check_trust_config(file: Path, setting: str) -> None:
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier

    try:
        Verifier(trusted_root=ClientTrustConfig.from_json(file.read_text(encoding="utf-8")).trusted_root)
    except OSError as error:
        raise UserError(
            f"can't read {file}, the client trust configuration of a Sigstore: {error.strerror}; correct {setting}, or "
            "mount the file readable for this user",
            code="trust-config-unreadable",
            setting=setting,
        ) from None
    except Exception as error:  # of pydantic and of sigstore, for what is no such file
        raise UserError(
            f"{file} is no client trust configuration of a Sigstore: {_reason(error)}. Get it from the Sigstore's "
            f"operator, and name it in {setting} (docs/security.md)",
            code="trust-config-invalid",
            setting=setting,
        ) from None


def _identity_token() -> str | None:
    """The token by which folders are signed without a key; None where there is none.

    Raises:
        UserError: its file can't be read.
    """
    if named := os.environ.get(TOKEN_VARIABLE):
        return named
    try:
        return TOKEN_FILE.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"can't read the identity's token {TOKEN_FILE}: {_reason(error)}; mount it readable for this user, or set "
            f"{TOKEN_VARIABLE}",
            code="token-unreadable",
            setting=TOKEN_VARIABLE,
        ) from None


def _reason(error: BaseException) -> str:
    """The words of a library's error, or those of its cause."""
    if isinstance(error, ValidationError):
        return first_problem(error)
    return shortened(str(error).strip().rstrip(".") or f"{type(error).__name__} {error.__cause__ or ''}", 500)


def sign_verdict(digests: Mapping[str, str], passed: bool, key: Any) -> bytes:
    """The gate's statement: whether a bundle passed, by which report and verdict."""
    return _signed("verdict", digests, {"passed": passed}, key)


def sign_approval(digests: Mapping[str, str], model: str, version: str, environment: str, days: int, key: Any) -> bytes:
    """The statement that a version may run in an environment, for some days."""
    expires = (datetime.now(UTC) + timedelta(days=days)).strftime(_TIME)
    predicate = {"model": model, "version": version, "environment": environment}
    return _signed("approval", digests, {**predicate, "approved": utc_now(), "expires": expires}, key)


def sign_shadow(digests: Mapping[str, str], key: Any) -> bytes:
    """The statement on a record of `enginery shadow`, about the digests that `check_shadow` takes."""
    return _signed("shadow", digests, {"signed": utc_now()}, key)


def _signed(kind: Kind, digests: Mapping[str, str], predicate: Any, key: Any) -> bytes:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    subject = [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}} for name, digest in digests.items()]
    statement = {
        "_type": _STATEMENT_TYPE,
        "subject": subject,
        "predicateType": _PREDICATES[kind],
        "predicate": predicate,
    }
    envelope = Envelope(canonical_json(statement), _IN_TOTO, {})
    envelope.sign(CryptoSigner(key))
    return canonical_json(envelope.to_dict()) + b"\n"


def read_statements(folder: Path) -> dict[str, bytes]:
    """The statements that lie in a folder, by file name.

    Raises:
        EngineryError: see `statement_names`.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob(STATEMENTS)) if _is_plain(file)}
    return {name: (folder / name).read_bytes() for name in statement_names(sizes)}


def statement_names(sizes: Mapping[str, int]) -> list[str]:
    """The statements among the files of a folder or store, by their names and sizes in bytes.

    Raises:
        EngineryError: they are more or larger than any that a signer of ours writes.
    """
    names = [name for name in sizes if "/" not in name and fnmatch(name, STATEMENTS)]
    if len(names) > _MAX_STATEMENTS or any(sizes[name] > _MAX_STATEMENT_BYTES for name in names):
        raise EngineryError(
            f"there are {len(names)} signed statements of up to {max(sizes[name] for name in names):,} bytes, and at "
            f"most {_MAX_STATEMENTS} of {_MAX_STATEMENT_BYTES:,} are read. Remove what nobody needs",
            code="statements-too-large",
        )
    return names


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()
