"""Where the time of small calls goes, from the samples of a profiler."""

import pytest

from benchmarks.stages import ELSEWHERE, Stages, rooms_of, table

SERVER = "/x/server/gradserve_server"
LOOP = f"serve ({SERVER}/commands/serve.py:111);run (asyncio/runners.py:118)"


@pytest.mark.parametrize(
    ("frames", "room"),
    [
        (f"{LOOP};unary ({SERVER}/rpc/listeners/grpc/listener.py:140);read (grpc/aio/_server.py:9)", "rpc/listeners"),
        (f"{LOOP};ApplyGradient ({SERVER}/rpc/accumulators/service.py:133)", "rpc/accumulators"),
        (f"{LOOP};apply ({SERVER}/accumulators/accumulator.py:125);sum (numpy/_methods.py:1)", "accumulators"),
        (f"{LOOP};start ({SERVER}/app.py:3)", "root"),
        (
            "method (/x/client/gradserve/face.py:163);pack (/x/client/gradserve_protocol/frames.py:82)",
            "gradserve_protocol",
        ),
        (LOOP, ELSEWHERE),
        ("_poll (grpc/_channel.py:12)", ELSEWHERE),
    ],
)
def test_a_sample_is_of_the_innermost_room(frames: str, room: str) -> None:
    assert rooms_of(f"{frames} 3\n{frames} 4") == {room: 7}


def test_the_table_has_the_dearest_rooms_first() -> None:
    found = Stages(
        call="apply_grad",
        way="bulk",
        microseconds=409.4,
        processor={"client": 120.0, "server": 270.0},
        rooms={"client": {"transport": 100.0, "calls": 20.0}, "server": {"accumulators": 200.0, "tensors": 70.0}},
    )
    assert table(found, most=1) == [
        "apply_grad, bulk: 409 us",
        "  client 120 us: transport 100",
        "  server 270 us: accumulators 200",
    ]
