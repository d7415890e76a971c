"""What can go wrong in the demo."""

from __future__ import annotations


class DemoError(Exception):
    """The demo could not run to its end; the message says why."""
