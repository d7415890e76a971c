"""Assembles the HTTP port."""

from gradserve_server.observe.http.guard import Guard
from gradserve_server.observe.http.pictures import Pictures
from gradserve_server.observe.http.port import HttpPort
from gradserve_server.observe.http.views import Views
from gradserve_server.observe.metrics.exposition import Exposition
from gradserve_server.observe.shown import Shown


def make_port(shown: Shown) -> HttpPort:
    """Returns what serves the port."""
    guard = Guard(shown.identify, asks_for_token=shown.asks_for_token, hosts=shown.hosts)
    pictures = Pictures(shown.status, shown.compute)
    return HttpPort(guard, Views(guard, pictures, Exposition(shown.observed, shown.status.facts)), shown.tls)
