"""Assembles the HTTP port."""

import asyncio
import threading

from gradserve_server.observe.http.budget import RestingSelector
from gradserve_server.observe.http.guard import Guard
from gradserve_server.observe.http.latest import Latest
from gradserve_server.observe.http.pictures import Pictures
from gradserve_server.observe.http.port import HttpPort
from gradserve_server.observe.http.views import Views
from gradserve_server.observe.shown import Shown


def make_port(shown: Shown, server_loop: asyncio.AbstractEventLoop) -> HttpPort:
    """Returns what serves the port on the event loop that runs in this thread; the server has another one."""
    guard = Guard(shown.identify, asks_for_token=shown.asks_for_token, hosts=shown.hosts)
    pictures = Pictures(Latest(shown.status.snapshot, server_loop))
    return HttpPort(Views(guard, pictures, Latest(shown.status.figures, server_loop)), shown.tls)


def make_loop(hurry: threading.Event) -> asyncio.AbstractEventLoop:
    """Returns the event loop of the port, whose thread rests from time to time until `hurry` is set."""
    return asyncio.SelectorEventLoop(RestingSelector(hurry))
