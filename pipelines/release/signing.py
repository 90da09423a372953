"""Signatures of releases: Ed25519 over SHA256SUMS, by `cryptography`. `openssl pkeyutl` makes and checks the same."""

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from components.common.errors import UserError

PASSPHRASE_VARIABLE = "ENGINERY_KEY_PASSPHRASE"  # noqa: S105  # the name of a variable
_MAKE = "make a pair with `openssl genpkey -algorithm ed25519 -out release.key` and " + (
    "`openssl pkey -in release.key -pubout -out release.pub`"
)


def private_key(file: Path) -> Ed25519PrivateKey:
    """The key to sign with: PEM, PKCS #8. Its passphrase, if it has one, is in ENGINERY_KEY_PASSPHRASE.

    Raises:
        UserError: the file is no such key, or the passphrase is missing or wrong.
    """
    data = _read(file)
    passphrase = os.environ.get(PASSPHRASE_VARIABLE)
    try:
        key = load_pem_private_key(data, passphrase.encode() if passphrase else None)
    except TypeError:  # a passphrase that is needed and missing, or given and not needed
        if passphrase:
            raise UserError(f"the key {file} has no passphrase; unset {PASSPHRASE_VARIABLE}") from None
        raise UserError(f"the key {file} has a passphrase; set {PASSPHRASE_VARIABLE} to it") from None
    except ValueError as error:
        if passphrase and b"ENCRYPTED" in data:
            raise UserError(f"the key {file} can't be opened with the passphrase in {PASSPHRASE_VARIABLE}") from None
        raise UserError(f"{file} is no private key in PEM ({error}); {_MAKE}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{file} is a key of another kind than Ed25519; {_MAKE}")
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    """The key to check a signature with: PEM.

    Raises:
        UserError: the file is no such key.
    """
    data = _read(file)
    if b"PRIVATE KEY" in data:
        raise UserError(
            f"{file} is a private key, which only the signer should have; a signature is checked with the public "
            f"one: `openssl pkey -in {file} -pubout -out release.pub`"
        )
    try:
        key = load_pem_public_key(data)
    except ValueError as error:
        raise UserError(f"{file} is no public key in PEM ({error}); {_MAKE}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{file} is a key of another kind than Ed25519; {_MAKE}")
    return key


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"can't read the key {file}: {error.strerror}; {_MAKE}") from None


def fingerprint(key: Ed25519PublicKey) -> str:
    """What tells a key from others: the digest of its DER form, as `openssl pkey -pubin -outform DER` writes it."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return "sha256:" + hashlib.sha256(der).hexdigest()


def is_signed_by(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    """Whether a signature is that of the key's owner on exactly these bytes."""
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True
