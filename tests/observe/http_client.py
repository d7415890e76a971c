"""Requests to the HTTP port of a server."""

import json
import ssl
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        status: Its status code.
        headers: Its headers, with names in lower case.
        text: Its body.
    """

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        """Its body, read as JSON."""
        return json.loads(self.text)


def url_of(local: LocalServer) -> str:
    """Returns the URL of a server's HTTP port."""
    return local.inspect(lambda server: server.observation.url)


def connect(url: str, tls: ssl.SSLContext | None = None) -> HTTPConnection:
    """Returns a connection to the host of a URL."""
    place = urlsplit(url)
    assert place.hostname is not None
    if place.scheme == "https":
        return HTTPSConnection(place.hostname, place.port, timeout=PATIENCE_SECONDS, context=tls)
    return HTTPConnection(place.hostname, place.port, timeout=PATIENCE_SECONDS)


def get(url: str, path: str, *, method: str = "GET", tls: ssl.SSLContext | None = None, **headers: str) -> Answer:
    """Makes a request. Headers are given with underscores: `user_agent="me"`."""
    with closing(connect(url, tls)) as connection:
        connection.putrequest(method, path, skip_host="Host" in headers or "host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read().decode())
