"""The certificate that a client has shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """The certificate of a client, which an authority of `--tls-client-ca` has signed.

    Attributes:
        common_name: The common name of its subject; empty if it has none.
        names: Its alternative names, of DNS and URI.
    """

    common_name: str
    names: tuple[str, ...] = ()

    @classmethod
    def of_socket(cls, shown: Mapping[str, Any] | None) -> "PeerCertificate | None":
        """Returns the certificate that `ssl.SSLSocket.getpeercert` describes; None for none."""
        if not shown:
            return None
        subject = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
        alternatives = shown.get("subjectAltName", ())
        return cls(
            subject[0] if subject else "",
            (
                *(name for kind, name in alternatives if kind == "DNS"),
                *(n for kind, n in alternatives if kind == "URI"),
            ),
        )

    @classmethod
    def of_properties(cls, properties: Mapping[str, Sequence[bytes]]) -> "PeerCertificate | None":
        """Returns the certificate in gRPC's properties of a connection; None for none."""
        if "x509_pem_cert" not in properties:
            return None
        common = properties.get("x509_common_name", ())
        names = (*properties.get("peer_dns", ()), *properties.get("peer_uri", ()))
        return cls(common[0].decode() if common else "", tuple(each.decode() for each in names))
