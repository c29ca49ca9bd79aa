"""The live view: four tables that follow the routers. Asking them happens in a thread, drawing in the app's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from router_ext.ops.top import rows
from router_ext.ops.top.sources import Look, Source, look_at


class TopApp(App[None]):
    """Looks every ``every_s`` seconds; never two looks at once."""

    TITLE = "fairlane top"
    CSS = """
    #routers { height: auto; padding: 0 1; }
    .title { height: 1; padding: 0 1; text-style: bold; }
    #pools, #tiers, #backends { height: auto; max-height: 25%; }
    #tenants { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        *(Binding(key, f"sort('{key}')", column) for key, (column, _) in rows.SORTS.items()),
        Binding("v", "reverse", "Reverse"),
        Binding("space", "pause", "Pause"),
    ]

    def __init__(self, sources: Sequence[Source], *, every_s: float = 1.0, sort: str = rows.DEFAULT_SORT) -> None:
        super().__init__()
        self._sources = sources
        self._every_s = every_s
        self._sort = sort
        self._is_reversed = False
        self._is_paused = False
        self._is_looking = False
        self._shares = rows.Shares()
        self._tenants: list[rows.Tenant] = []

    def compose(self) -> ComposeResult:
        yield Static(id="routers", markup=False)
        yield Static("Pools", classes="title")
        yield DataTable(id="pools", cursor_type="none")
        yield Static("Tiers, last five minutes", classes="title")
        yield DataTable(id="tiers", cursor_type="none")
        yield Static("Tenants", classes="title", id="tenants-title")
        yield DataTable(id="tenants", cursor_type="row")
        yield Static("Backends", classes="title")
        yield DataTable(id="backends", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        for name, columns in (
            ("pools", rows.POOL_COLUMNS),
            ("tiers", rows.TIER_COLUMNS),
            ("tenants", rows.TENANT_COLUMNS),
            ("backends", rows.BACKEND_COLUMNS),
        ):
            self._table(name).add_columns(*columns)
        self.set_interval(self._every_s, self.look)
        await self.look()

    async def look(self) -> None:
        """Ask the routers and draw what they say."""
        if self._is_looking or self._is_paused:
            return
        self._is_looking = True
        try:
            looks = await asyncio.to_thread(look_at, self._sources)
        finally:
            self._is_looking = False
        self.show(looks)

    def show(self, looks: Sequence[Look]) -> None:
        """Draw these looks."""
        self.query_one("#routers", Static).update("\n".join(rows.headline(look) for look in looks))
        self._tenants = self._shares.tenants(looks)
        self._fill("pools", rows.pool_rows(looks))
        self._fill("tiers", rows.tier_rows(looks))
        self._fill("backends", rows.backend_rows(looks))
        self._draw_tenants()

    def _draw_tenants(self) -> None:
        column = rows.SORTS[self._sort][0]
        direction = ", reversed" if self._is_reversed else ""
        state = "; paused" if self._is_paused else ""
        self.query_one("#tenants-title", Static).update(f"Tenants by {column}{direction}{state}")
        ordered = rows.sorted_tenants(self._tenants, self._sort, is_reversed=self._is_reversed)
        self._fill("tenants", rows.tenant_rows(ordered))

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    def _fill(self, name: str, found: Sequence[rows.Row]) -> None:
        table = self._table(name)
        row, scrolled = table.cursor_row, table.scroll_y
        table.clear()
        # Plain text: a name with brackets is no markup.
        table.add_rows([[Text(cell) for cell in each] for each in found])
        table.move_cursor(row=row, animate=False, scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    # --- keys -------------------------------------------------------------------------------------------------------

    def action_sort(self, key: str) -> None:
        self._sort = key
        self._draw_tenants()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._draw_tenants()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw_tenants()
