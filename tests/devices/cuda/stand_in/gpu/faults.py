"""What a program must not do to a GPU, and did."""

import threading
import traceback
from pathlib import Path


class Fault(RuntimeError):  # noqa: N818
    """A mistake of the program that uses the GPU, which a real one might not show."""


class Faults:
    """The faults of a process."""

    def __init__(self, report: str | None) -> None:
        self.messages: list[str] = []
        self._report = report
        self._lock = threading.Lock()

    def add(self, message: str) -> Fault:
        """Records a fault with the stack of its thread, and returns it, to be raised."""
        stack = "".join(traceback.format_stack(limit=16)[:-1])
        with self._lock:
            self.messages.append(message)
            if self._report is not None:
                with Path(self._report).open("a", encoding="utf-8") as file:
                    file.write(f"{message}\n{stack}\n")
        return Fault(message)

    def check(self) -> None:
        """Fails if there were any."""
        assert not self.messages, "\n".join(self.messages)

    def expected(self, *words: str) -> str:
        """Returns the only fault that there was, which has these words, and forgets it."""
        (message,) = self.messages
        assert all(word in message for word in words), message
        self.messages.clear()
        return message
