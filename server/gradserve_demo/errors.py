"""The exception of the demo."""


class DemoError(Exception):
    """The demo could not finish; the message says why."""
