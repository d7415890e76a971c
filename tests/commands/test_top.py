"""`gradserve top`."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent

import gradserve.aio
from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ArrivalStatus,
    EvaluationStatus,
    ParametersStatus,
    RoundStatus,
    ServerStatus,
    WeightStatus,
)
from gradserve_server.commands.servers import Answer
from gradserve_server.commands.top.app import TopApp
from gradserve_server.commands.top.panels import plain_text, rounds_panel
from gradserve_server.commands.top.picture import Picture, Rates
from gradserve_testing import LocalServer
from tests.commands.conftest import CommandLine
from tests.servers.polling import eventually_async


def text_of(app: TopApp, name: str) -> str:
    return str(app.query_one(name, Static).render())


async def shows(app: TopApp, pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Waits until the program shows something."""

    async def is_shown() -> bool:
        await pilot.pause()
        return condition()

    await eventually_async(is_shown)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_keys_do_what_the_footer_says(local: LocalServer, trained: str, size: tuple[int, int]) -> None:
    orders: list[tuple[str, str]] = []
    async with gradserve.aio.connect(local.address) as client:

        async def take_picture(part: str, order: str) -> Picture:
            orders.append((part, order))
            return (Answer(0, local.address, await client.server_status(name_contains=part, order=order)),)

        app = TopApp(local.address, take_picture, 3600.0)
        async with app.run_test(size=size) as pilot:
            table = app.query_one(DataTable)
            await shows(app, pilot, lambda: table.row_count > 0)
            await pilot.press("slash", *"trained", "enter")
            await shows(app, pilot, lambda: table.row_count == 1)
            assert trained in text_of(app, "#rounds-text")
            assert "too late: slow" in text_of(app, "#rounds-text")
            await pilot.press("s", "s")
            await shows(app, pilot, lambda: orders[-1] == ("trained", "rate"))
            tabs = app.query_one(TabbedContent)
            for wanted in ("workers", "server", "errors", "rounds"):
                await pilot.press("right_square_bracket")
                assert tabs.active == wanted
            assert "slow" in text_of(app, "#workers-text")
            assert "accumulators" in text_of(app, "#server-text")
            await pilot.press("p")
            assert "PAUSED" in text_of(app, "#headline")
            await pilot.press("p", "escape")
            await shows(app, pilot, lambda: orders[-1][0] == "")


async def test_a_name_from_the_command_line_is_the_first_filter() -> None:
    asked: list[str] = []

    async def take_picture(part: str, _order: str) -> Picture:
        asked.append(part)
        return (Answer(0, "h:1", ServerStatus()),)

    app = TopApp("h:1", take_picture, 3600.0, "net")
    async with app.run_test() as pilot:
        await shows(app, pilot, lambda: bool(asked))
        assert set(asked) == {"net"}
        await pilot.press("escape")
        await shows(app, pilot, lambda: asked[-1] == "")


async def test_a_key_that_is_pressed_during_a_look_counts() -> None:
    orders: list[str] = []
    answers = asyncio.Event()

    async def take_picture(_part: str, order: str) -> Picture:
        orders.append(order)
        await answers.wait()
        return (Answer(0, "h:1", ServerStatus()),)

    app = TopApp("h:1", take_picture, 3600.0)
    async with app.run_test() as pilot:
        await shows(app, pilot, lambda: orders == ["latest"])
        await pilot.press("s")
        answers.set()
        await shows(app, pilot, lambda: orders == ["latest", "name"])


async def test_what_comes_while_the_screen_is_taken_down_ends_nothing() -> None:
    """An answer, and messages of the table's and the filter's own."""
    is_gone = asyncio.Event()
    looks: list[str] = []

    class Last(Static):
        def on_unmount(self) -> None:
            is_gone.set()

    async def take_picture(_part: str, order: str) -> Picture:
        looks.append(order)
        if len(looks) > 1:
            await is_gone.wait()
            app.on_data_table_row_highlighted()
            app.on_input_submitted()
            looks.append("after the end")
        return (Answer(0, "h:1", ServerStatus(accumulators=(AccumulatorStatus("default", "net"),))),)

    app = TopApp("h:1", take_picture, 3600.0)
    async with app.run_test() as pilot:
        await shows(app, pilot, lambda: app.query_one(DataTable).row_count == 1)
        await app.mount(Last())
        await pilot.press("s")
    assert looks == ["latest", "name", "after the end"]


async def test_a_server_that_goes_away_is_said_to_be_gone() -> None:
    async def take_picture(_part: str, _order: str) -> Picture:
        return (Answer(0, "h:1", problem="nobody listens there"),)

    app = TopApp("h:1", take_picture, 3600.0)
    async with app.run_test() as pilot:
        await shows(app, pilot, lambda: "no answer: nobody listens there" in text_of(app, "#problem"))


def test_one_picture_is_printed_as_json(command_line: CommandLine, trained: str) -> None:
    found = command_line.json("top", "--name", trained)
    assert [each["name"] for each in found["accumulators"]] == [trained]


def test_rates_begin_again_with_another_run_of_the_server() -> None:
    first = ServerStatus(incarnation="a", uptime=10.0)
    totals = replace(first.totals, rounds=20, accepted=40)
    later = replace(first, uptime=20.0, totals=totals)
    assert (Rates.between(first, later).rounds, Rates.between(first, later).gradients) == (2.0, 4.0)
    assert Rates.between(None, later) == Rates()
    assert Rates.between(later, replace(later, incarnation="b", uptime=30.0)) == Rates()


def test_a_pipe_gets_one_picture_without_codes_for_terminals(command_line: CommandLine, trained: str) -> None:
    done = command_line.run("top")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{command_line.address}  gradserve ")
    assert lines[2].split() == ["NAME", "STEP", "ROUNDS/S", "IN", "ROUND", "WAIT", "STALE", "ROUND", "MEMORY"]
    assert [line.split()[1] for line in lines if line.startswith(trained)] == ["2"]
    assert any(line.startswith("slow ") for line in lines)


def test_whether_weights_are_equal_stands_above_the_rounds() -> None:
    equal = AccumulatorStatus("default", "net", num_compared=8, compared_step=40)
    assert rounds_panel(equal, 9.0).splitlines()[0] == "weights equal on 8 workers at step 40"
    other = replace(equal, different={"b": 20}, different_since={"b": 30})
    assert rounds_panel(other, 9.0).splitlines()[0] == (
        "with other parameters than most: b (since step 30, equal at step 20); 8 workers compared at step 40"
    )
    assert rounds_panel(AccumulatorStatus("default", "net"), 9.0) == "net: no round has ended yet."


async def test_parameters_are_rows_of_their_own_beside_an_accumulator_of_the_same_name() -> None:
    late = RoundStatus(
        2, 1.0, 3.0, 2, (ArrivalStatus("a"), ArrivalStatus("b", 1.0, staleness=3)), ("c",), "deadline", 0.1
    )
    late = replace(late, metrics={"loss": 0.25, "accuracy": math.nan})
    listed = ParametersStatus(
        "default",
        "net",
        step=2,
        num_updates=1,
        num_required=4,
        rounds=(late, RoundStatus(3, 4.0, arrivals=(ArrivalStatus("a"),))),
        optimizer="sgd(lr=0.5)",
        rules="4 updates",
        weights=WeightStatus(3.0, 2.0, 1.0),
        num_counted=2,
        num_live=3,
        evaluations=(EvaluationStatus(0, {"loss": 4.0}), EvaluationStatus(1, {"loss": 0.5})),
    )
    status = ServerStatus(
        uptime=9.0, accumulators=(AccumulatorStatus("default", "net", global_step=7),), parameters=(listed,)
    )

    async def take_picture(_part: str, _order: str) -> Picture:
        return (Answer(0, "h:1", status),)

    app = TopApp("h:1", take_picture, 3600.0)
    async with app.run_test(size=(160, 50)) as pilot:
        table = app.query_one(DataTable)
        await shows(app, pilot, lambda: table.row_count == 2)
        rows = [[str(cell) for cell in table.get_row_at(at)][:2] for at in range(2)]
        assert rows == [["net (parameters)", "2"], ["net", "7"]]
        shown = text_of(app, "#rounds-text")
        assert "sgd(lr=0.5), learning rate 0; 4 updates" in shown
        assert "weight: 3 accepted = 2 applied + 1 pending" in shown
        assert "updates of 2 of 3 live workers" in shown
        for measured in ("metrics of the latest round: accuracy nan, loss 0.25", "evaluation of step 1: loss 0.5"):
            assert measured in shown
            assert f"net: {measured}" in plain_text("h:1", (Answer(0, "h:1", status),))
        assert "last: b; ended by its deadline; up to 3 stale; missing: c" in shown
