"""TLS from a certificate and a key in PEM files."""

from __future__ import annotations

import ssl
from pathlib import Path

from jaxserve.errors import ConfigError

HANDSHAKE_TIMEOUT_S = 15.0


def ssl_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """For a server with this certificate chain; None without one. TLS 1.2 at least.

    Without `keyfile` the key is in `certfile` too. Raises ConfigError.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError(f"--ssl-keyfile {keyfile} needs the certificate: pass --ssl-certfile too")
        return None
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {path} can't be read: {error.strerror}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        what = f"--ssl-certfile {certfile}" + ("" if keyfile is None else f", --ssl-keyfile {keyfile}")
        raise ConfigError(
            f"{what}: no PEM certificate with its unencrypted private key: "
            f"{getattr(error, 'reason', None) or error}"
        ) from None
    return context


def _no_password() -> str:
    """In place of OpenSSL's question on the terminal."""
    raise ValueError("the key is encrypted; write it without a password")
