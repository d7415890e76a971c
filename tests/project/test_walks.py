"""What `make walks` counts."""

import asyncio
import logging
from contextlib import suppress

import gradserve
from deploy.walks import Tracer, sizes
from gradserve_protocol.lasting import keep_doing


def test_a_call_enters_files_and_rooms(client: gradserve.Client) -> None:
    with Tracer() as tracer:
        walk = tracer.of(client.server_info)
    assert "face.py" in {file.name for file in walk.files}
    assert walk.calls > walk.file_switches > walk.room_switches > 0


def test_what_a_server_does_without_calls_is_no_part_of_one() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with Tracer() as tracer, tracer.walking() as walk, suppress(asyncio.CancelledError):
        asyncio.run(keep_doing("the work", work, logging.getLogger()))
    assert walk.calls == 0


def test_sizes_are_of_what_people_have_written() -> None:
    numbers = sizes()
    assert numbers["lines (py, pyi, cu, js)"] > numbers["modules (without `__init__.py`)"] > 100
