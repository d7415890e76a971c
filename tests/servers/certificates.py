"""Certificates of every kind."""

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path

import gradserve
from gradserve_server.config import ServerConfig, TlsConfig
from gradserve_server.security.authority import Authority, Issued
from tests.servers.runtime import NOT_WARMED_UP

HOSTS = ("localhost", "127.0.0.1", "::1")
LONG_AGO = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)


@dataclass(frozen=True)
class Certificates:
    """Files of two authorities, of which one is strange to everybody."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def strange_ca(self) -> Path:
        return self.folder / "strange" / "ca.pem"

    def config(self, server: str = "server", *, asks_clients: bool = False) -> ServerConfig:
        tls = TlsConfig(
            tls_certificate=str(self.folder / f"{server}.pem"),
            tls_key=str(self.folder / f"{server}.key"),
            tls_client_ca=str(self.ca) if asks_clients else None,
        )
        return ServerConfig(runtime=NOT_WARMED_UP, tls=tls)

    def client(self, name: str = "", *, strange_ca: bool = False) -> gradserve.TLS:
        ca = self.strange_ca if strange_ca else self.ca
        if not name:
            return gradserve.TLS(ca)
        return gradserve.TLS(ca, self.folder / f"{name}.pem", self.folder / f"{name}.key")


def make_certificates(folder: Path) -> Certificates:
    authority = Authority.in_folder(folder)
    _rename(authority.issue_server(HOSTS, 30, LONG_AGO), folder / "expired")
    _rename(authority.issue_server(["elsewhere.example"], 30), folder / "elsewhere")
    authority.issue_server(HOSTS, 30)
    authority.issue_client("worker-1", 30)
    authority.issue_client("worker-2", 30)
    authority.issue_client("late", 30, LONG_AGO)
    strange = Authority.in_folder(folder / "strange")
    _rename(strange.issue_client("stranger", 30), folder / "stranger")
    return Certificates(folder)


def _rename(issued: Issued, base: Path) -> None:
    shutil.move(issued.certificate, base.with_suffix(".pem"))
    shutil.move(issued.key, base.with_suffix(".key"))
