"""What `make walks` counts."""

import gradserve
from deploy.walks import Tracer, sizes


def test_a_call_enters_files_and_rooms(client: gradserve.Client) -> None:
    with Tracer() as tracer:
        walk = tracer.of(client.server_info)
    assert "face.py" in {file.name for file in walk.files}
    assert walk.calls > walk.file_switches > walk.room_switches > 0


def test_sizes_are_of_what_people_have_written() -> None:
    numbers = sizes()
    assert numbers["lines (py, pyi, cu, js)"] > numbers["modules (without `__init__.py`)"] > 100
