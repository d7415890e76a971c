"""The terminal program of `gradserve top`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from gradserve_protocol.printing import visible
from gradserve_protocol.server_status import ParametersStatus, ServerStatus
from gradserve_server.commands.top.panels import (
    COLUMNS,
    Listed,
    cells,
    errors_panel,
    full_name,
    headline,
    rounds_panel,
    server_panel,
    servers_panel,
    workers_panel,
)
from gradserve_server.commands.top.picture import Picture, Rates, whole

ORDERS = ("latest", "name", "rate", "waiting", "bytes")
_PANELS = ("rounds", "workers", "server", "errors")

TakePicture = Callable[[str, str], Awaitable[Picture]]
"""Returns a picture of each server: takes a part of the names, and the order."""


class TopApp(App[None]):
    """Shows a server or a cluster at work, and follows it."""

    TITLE = "gradserve top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: 1; background: $primary; color: $text; }
    #problem { height: 1; background: $error; color: $text; display: none; }
    #problem.shown { display: block; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    DataTable { height: 1fr; min-height: 5; }
    TabbedContent { height: 1fr; min-height: 8; }
    TabPane { padding: 0 1; }
    TabPane Static { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "next_order", "Sort"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "end_filter", "All", show=False),
        Binding("p", "pause", "Pause"),
        Binding("left_square_bracket,shift+tab", "panel(-1)", "Panel", key_display="["),
        Binding("right_square_bracket,tab", "panel(1)", "Panel", key_display="]", priority=True),
    ]

    def __init__(
        self, address: str, take_picture: TakePicture, interval: float, name: str = "", *, num_servers: int = 1
    ) -> None:
        super().__init__()
        self._is_cluster = num_servers > 1
        self._panels = ("rounds", "servers", *_PANELS[1:]) if self._is_cluster else _PANELS
        self._address = address
        self._take_picture = take_picture
        self._interval = interval
        self._order = ORDERS[0]
        self._part = name
        self._is_paused = False
        self._picture: Picture = ()
        self._status: ServerStatus | None = None
        self._rates = Rates()
        self._rates_of_servers: dict[int, Rates] = {}
        self._look_again = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Makes the widgets."""
        yield Static(visible(f"{self._address}: connecting"), id="headline", markup=False)
        yield Static(id="problem", markup=False)
        yield Input(
            self._part,
            placeholder="a part of container/name; Enter keeps it, Escape shows all",
            id="filter",
            classes="shown" if self._part else "",
        )
        yield DataTable(cursor_type="row", zebra_stripes=True)
        with TabbedContent(*(name.capitalize() for name in self._panels)):
            for name in self._panels:
                with TabPane(name.capitalize(), id=name), ScrollableContainer():
                    yield Static(id=f"{name}-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begins to follow the server."""
        self.query_one(DataTable).add_columns(*COLUMNS, *(("SERVER",) if self._is_cluster else ()))
        self.query_one(DataTable).focus()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        while True:
            self._look_again.clear()  # before the look: a key that is pressed during it asks for another one
            if not self._is_paused:
                await self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._look_again.wait()

    async def _look(self) -> None:
        picture = await self._take_picture(self._part, self._order)
        if not self.is_running:
            return  # The screen is being taken down.
        problem = self.query_one("#problem", Static)
        silent = [each for each in picture if each.problem]
        where = f"server {silent[0].index} at {silent[0].address}: " if silent and self._is_cluster else ""
        problem.update(visible("; ".join([f"no answer: {where}{each.problem}" for each in silent[:1]])))
        problem.set_class(bool(silent), "shown")
        if len(silent) == len(picture):
            return  # What was seen last stays.
        before = {each.index: each.value for each in self._picture}
        status = whole(picture, self._order)
        self._rates = Rates.between(self._status, status)
        self._rates_of_servers = {
            each.index: Rates.between(before.get(each.index), each.value) for each in picture if each.value
        }
        self._picture, self._status = picture, status
        self._show(status)

    def _show(self, status: ServerStatus) -> None:
        state = "  PAUSED" if self._is_paused else ""
        self.query_one("#headline", Static).update(
            Text(headline(self._address, status, self._rates) + f"  by {self._order}{state}", no_wrap=True)
        )
        self._fill(_listed(status))
        self._show_panels()

    def _fill(self, listed: Sequence[Listed]) -> None:
        shown = self.query_one(DataTable)
        selected, top = self._selected_key(), shown.scroll_y
        shown.clear()
        homes = {_key(each): seen.index for seen in self._picture if seen.value for each in _listed(seen.value)}
        for each in listed:
            home = (str(homes[_key(each)]),) if self._is_cluster else ()
            kind = " (parameters)" if isinstance(each, ParametersStatus) else ""
            shown.add_row(
                Text(visible(full_name(each) + kind), no_wrap=True), *map(_right, (*cells(each), *home)), key=_key(each)
            )
        keys = [_key(each) for each in listed]
        if selected in keys:
            shown.move_cursor(row=keys.index(selected), animate=False, scroll=False)
        shown.scroll_to(y=top, animate=False)

    def _show_panels(self) -> None:
        status = self._status
        if status is None:
            return
        texts = {
            "rounds": rounds_panel(self._selected(), status.uptime),
            "workers": workers_panel(status),
            "server": server_panel(status, self._rates),
            "errors": errors_panel(status),
        }
        if self._is_cluster:
            texts["servers"] = servers_panel(self._picture, self._rates_of_servers)
        for name, text in texts.items():
            self.query_one(f"#{name}-text", Static).update(Text(text, no_wrap=True))

    def _selected_key(self) -> str | None:
        shown = self.query_one(DataTable)
        if not shown.row_count:
            return None
        return shown.coordinate_to_cell_key(shown.cursor_coordinate).row_key.value

    def _selected(self) -> Listed | None:
        key = self._selected_key()
        found = _listed(self._status) if self._status is not None else ()
        return next((each for each in found if _key(each) == key), None)

    # What keys do

    def on_data_table_row_highlighted(self) -> None:
        """Shows the rounds of the selected accumulator or parameters."""
        if self.is_running:
            self._show_panels()

    def action_next_order(self) -> None:
        """Sorts by the next column that one can sort by."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._look_again.set()

    def action_filter(self) -> None:
        """Asks for a part of names."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Shows accumulators and parameters with that part in their names."""
        self._part = event.value
        self._look_again.set()

    def on_input_submitted(self) -> None:
        """Goes back to the table."""
        if self.is_running:
            self.query_one(DataTable).focus()

    def action_end_filter(self) -> None:
        """Shows all accumulators and parameters again."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.query_one(DataTable).focus()

    def action_pause(self) -> None:
        """Stops following the server, or goes on."""
        self._is_paused = not self._is_paused
        if self._status is not None:
            self._show(self._status)
        self._look_again.set()

    def action_panel(self, step: int) -> None:
        """Shows the next panel, or the one before."""
        tabs = self.query_one(TabbedContent)
        tabs.active = self._panels[(self._panels.index(tabs.active) + step) % len(self._panels)]
        self.query_one(DataTable).focus()


def _listed(status: ServerStatus) -> Sequence[Listed]:
    """Returns the parameters, then the accumulators, as they are shown."""
    return (*status.parameters, *status.accumulators)


def _key(each: Listed) -> str:
    kind = "parameters" if isinstance(each, ParametersStatus) else "accumulator"
    return f"{kind} {each.container}/{each.name}"


def _right(cell: str) -> Text:
    return Text(cell, justify="right", no_wrap=True)
