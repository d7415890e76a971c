"""All targets, by name."""

from collections.abc import Callable
from functools import partial

from tests.fuzz.targets.calls import Calls
from tests.fuzz.targets.codecs import Codecs
from tests.fuzz.targets.frames import Frames
from tests.fuzz.targets.recording import SHARDED
from tests.fuzz.targets.state import State
from tests.fuzz.targets.target import Target

TARGETS: dict[str, Callable[[], Target]] = {
    "calls": Calls,
    "shards": partial(Calls, SHARDED),
    "codecs": Codecs,
    "frames": Frames,
    "state": State,
}
