"""Public keys of signers: ECDSA P-256 as `enginery release` signs, and Ed25519 of releases up to version 0.1."""

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from components.common.digests import digest_bytes
from components.common.errors import UserError
from components.common.trust import MAKE_KEY, load_public_key, read_key

PublicKey = EllipticCurvePublicKey | Ed25519PublicKey


def public_key(file: Path) -> PublicKey:
    """The key to check a release with: PEM.

    Raises:
        UserError: the file is no such key.
    """
    data = read_key(file)
    if b"PRIVATE KEY" in data:
        raise UserError(
            f"{file} is a private key, which only the signer should have; a signature is checked with the public "
            f"one: `openssl pkey -in {file} -pubout -out enginery.pub`"
        )
    try:
        key = load_pem_public_key(data)
        return key if isinstance(key, Ed25519PublicKey) else load_public_key(data, str(file))
    except ValueError as error:
        raise UserError(f"{file} is no public key in PEM ({error}); {MAKE_KEY}") from None


def fingerprint(key: PublicKey) -> str:
    """What tells a key from others: the digest of its DER form, as `openssl pkey -pubin -outform DER` writes it."""
    return digest_bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def is_signed_by(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    """Whether a signature is that of the key's owner on exactly these bytes."""
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True
