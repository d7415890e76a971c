"""Errors of the operating system in words."""


def reason_of(error: OSError) -> str:
    """Returns the system's reason for an error, to follow a colon: "address already in use"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
