"""What can go wrong in the demo."""


class DemoError(Exception):
    """The demo could not run to its end; the message says why."""
