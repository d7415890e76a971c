"""The settings of a connection."""

DEFAULT_TIMEOUT_SECONDS = 60.0
