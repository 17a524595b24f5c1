"""SSH keys of one lab: one for the controller and one host key per machine, generated before the first boot.

Host keys are therefore pinned from the first connection on: there is no "trust on first use".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["KeyPair", "generate", "write_private"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An Ed25519 key pair: `private` in OpenSSH's format, `public` as one line of an authorized_keys file."""

    private: str
    public: str


def generate() -> KeyPair:
    """Generate a key pair."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private=private.decode(), public=public.decode())


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at no moment readable by other users."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
