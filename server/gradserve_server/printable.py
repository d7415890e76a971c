"""`gradserve.visible` for commands and the log, which do not import the client for texts that need nothing."""


def visible(text: str) -> str:
    """See `gradserve.visible`."""
    if text.isascii() and text.isprintable():
        return text
    from gradserve.visible import visible

    return visible(text)


def visible_lines(text: str) -> str:
    """See `gradserve.visible`."""
    return "\n  ".join(map(visible, text.split("\n")))
