"""Keys that sign verdicts, approvals and folders: ECDSA P-256, in PEM."""

import os
from pathlib import Path
from typing import Any

from components.common.contracts.digests import digest_bytes
from components.common.contracts.errors import UserError

KEY_VARIABLE = "ENGINERY_SIGNING_KEY"  # private key with which steps sign: its file, or itself in PEM, from a Secret
PASSPHRASE_VARIABLE = "ENGINERY_KEY_PASSPHRASE"  # noqa: S105  # the name of a variable
MAKE_KEY = (
    "make a pair with `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out enginery.key` and "
    + ("`openssl pkey -in enginery.key -pubout -out enginery.pub`")
)


def signing_key(file: Path) -> Any:
    """The private key to sign with: ECDSA P-256 in PEM. Its passphrase, if it has one, is in ENGINERY_KEY_PASSPHRASE.

    Raises:
        UserError: the file is no such key, or the passphrase is missing or wrong.
    """
    return private_key(read_key(file), str(file))


def private_key(data: bytes, file: str) -> Any:
    """The same of the content of a file, or of a variable.

    Raises:
        UserError: see `signing_key`.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    try:
        key = load_pem_private_key(data, passphrase.encode() if passphrase else None)
    except TypeError:  # a passphrase that is needed and missing, or given and not needed
        if passphrase:
            message = f"the key {file} has no passphrase; unset {PASSPHRASE_VARIABLE}"
            raise UserError(message, code="passphrase-not-needed", setting=PASSPHRASE_VARIABLE) from None
        message = f"the key {file} has a passphrase; set {PASSPHRASE_VARIABLE} to it"
        raise UserError(message, code="passphrase-missing", setting=PASSPHRASE_VARIABLE) from None
    except UnsupportedAlgorithm:  # such as another curve
        key = None
    except ValueError:
        if passphrase and b"ENCRYPTED" in data:
            message = f"the key {file} can't be opened with the passphrase in {PASSPHRASE_VARIABLE}"
            raise UserError(message, code="passphrase-wrong", setting=PASSPHRASE_VARIABLE) from None
        message = f"{file} is no private key in PEM (-----BEGIN PRIVATE KEY-----); {MAKE_KEY}"
        raise UserError(message, code="not-a-private-key") from None
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise UserError(f"{file} is a key of another kind than ECDSA P-256; {MAKE_KEY}", code="other-key-kind")
    return key


def step_key() -> Any:
    """The private key that a step is to sign with; None where it is not to sign.

    Raises:
        UserError: see `signing_key`.
    """
    named = os.environ.get(KEY_VARIABLE, "")
    if named.lstrip().startswith("-----BEGIN"):
        return private_key(named.encode(), KEY_VARIABLE)
    return signing_key(Path(named)) if named else None


def load_public_key(data: bytes, where: str) -> Any:
    """A public key, ECDSA P-256 in PEM.

    Raises:
        ValueError: it is none.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except UnsupportedAlgorithm:  # such as another curve
        key = None
    except ValueError:
        raise ValueError(f"{where} is no public key in PEM (-----BEGIN PUBLIC KEY-----); {MAKE_KEY}") from None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError(f"{where} is a key of another kind than ECDSA P-256; {MAKE_KEY}")
    return key


def read_key(file: Path) -> bytes:
    """A key's file.

    Raises:
        UserError: it can't be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"can't read the key {file}: {error.strerror}; {MAKE_KEY}", code="key-unreadable") from None


def public_pem(key: Any) -> str:
    """A public key as text, in the one form that digests are taken of."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def key_hint(public_key: str) -> str:
    """Return model-signing's name of a key."""
    pem = public_pem(load_public_key(public_key.encode(), "public_key"))
    return digest_bytes(pem.encode()).removeprefix("sha256:")
