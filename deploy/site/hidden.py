"""Comments before blocks of code that say how their tests run them. Readers see none of them.

<!-- setup: CODE -->     runs first, in the same namespace; a `server_address` that it sets takes the server's place
<!-- check: CODE -->     runs afterwards
<!-- prints: REGEX -->   is found in what the program prints
<!-- workers: 4 -->      so many threads run setup, block and check, each in a namespace of its own with `worker`
<!-- continued -->       the block goes on where the one before ended
<!-- run -->             the commands of a console are run, and print what is printed
<!-- run by: FILE -->    another test runs it
<!-- not run: REASON --> nothing does
"""

import re

COMMENT = re.compile(
    r"^[ ]*<!--\s*(setup|check|prints|workers|continued|run by|run|not run)\b:?(.*?)-->[ ]*\n+",
    re.DOTALL | re.MULTILINE,
)


def without_comments(text: str) -> str:
    """Returns a page without these comments."""
    return COMMENT.sub("", text)
