"""The event loop of a server."""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop: uvloop's where it is installed, which takes less time for a call, or asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
