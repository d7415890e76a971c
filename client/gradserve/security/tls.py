"""What a client needs for encrypted connections."""

import os
from dataclasses import dataclass

from gradserve.errors import InvalidArgumentError


@dataclass(frozen=True)
class TLS:
    """Encrypted connections to a server, for `connect`. All files are in PEM format.

    The server's certificate has to be valid for the host of the address, and signed by an authority of `ca`. When files
    change, later connections use the new ones.

    Attributes:
        ca: The file with the certificates of the authorities that are trusted; None for those that the system trusts.
        certificate: The file with the client's own certificate, followed by those between it and its authority if there
            are any; None if the server asks for no certificate.
        key: The file with the private key of `certificate`, without a password.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str | os.PathLike)):
                raise InvalidArgumentError(
                    f"expected the path of a file for {name}, got {type(value).__qualname__}", field=f"tls.{name}"
                )
        if (self.certificate is None) != (self.key is None):
            missing, given = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise InvalidArgumentError(f"expected {missing} as well, because {given} is given", field=f"tls.{missing}")
