"""Price lists: what tokens cost, from which day on, and who pays by which list.

A price is a whole number of micro-currency for 1,000,000 tokens, so what tokens cost is a whole number of 10^-12 of the
currency (``pico``) and adds up exactly. It is rounded only where an amount is charged: each line of a statement once,
half to even, to micro-currency (``rounded_micro``); its total is the sum of its lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, TypedDict
from zoneinfo import ZoneInfo

from django.db import connection
from django.db.models import ProtectedError, QuerySet
from typing_extensions import Unpack

from controlplane.audit.actions import record, save_change
from controlplane.common.access import visible
from controlplane.common.actor import Actor
from controlplane.common.errors import Conflict
from controlplane.common.use_case import use_case
from controlplane.common.validation import Checks, lock_version
from controlplane.common.zones import check_zone, day_start
from controlplane.usage.models import MAX_PRICE, Price, PriceList

PICO = 10**12
MAX_PRICES = 1_000
_CURRENCY = re.compile(r"[A-Z]{3}\Z")
PRICE_DAYS = (date(2000, 1, 1), date(2999, 12, 31))
"""Days with which prices and assignments may begin; nothing was booked before the first."""

PAYS_SQL = """
    LEFT JOIN (
        SELECT tenant_id, price_list_id, valid_from, from_at,
               lead(from_at, 1, 'infinity') OVER (PARTITION BY tenant_id ORDER BY from_at) AS to_at
        FROM usage_price_assignment
    ) AS pays ON pays.tenant_id = {row}.tenant AND pays.from_at <= {at} AND pays.to_at > {at}"""
"""Joins ``pays.price_list_id``: by which list the tenant of ``{row}`` paid at ``{at}``."""
# Of a row ``used`` with ``model``, ``period`` (how many of ``changes`` are not after it) and tokens, and a list's id.
_OF_LIST_SQL = """
    LEFT JOIN usage_price_list AS list ON list.id = {list}
    LEFT JOIN LATERAL (
        SELECT * FROM usage_price
        WHERE usage_price.price_list_id = list.id AND usage_price.model IN (used.model, '')
          AND usage_price.from_at <= (%(changes)s::timestamptz[])[used.period]
        ORDER BY usage_price.model = '', usage_price.from_at DESC LIMIT 1
    ) AS price ON true"""
_PERIOD_FROM = "(%(changes)s::timestamptz[])[used.period]"
PRICE_SQL = PAYS_SQL.format(row="used", at=_PERIOD_FROM) + _OF_LIST_SQL.format(list="pays.price_list_id")
"""Joins ``price``, and its ``list``, to rows ``used`` by tenant; ``LIST_PRICE_SQL``: to rows by ``price_list``."""
LIST_PRICE_SQL = _OF_LIST_SQL.format(list="used.price_list")
PICO_SQL = "(price.prompt_micro * used.prompt_tokens::numeric + price.output_micro * used.output_tokens::numeric)"


class PriceListChanges(TypedDict, total=False):
    name: str
    prices: Sequence[Mapping[str, Any]]
    managed_by: str


def decimal_text(pico: int) -> str:
    """An amount in its currency with all of its twelve decimals; sums of such texts are exact."""
    whole, rest = divmod(abs(pico), PICO)
    return f"{'-' if pico < 0 else ''}{whole}.{rest:012d}"


def rounded_micro(pico: int) -> int:
    """Whole micro-currency, half to even."""
    whole, rest = divmod(pico, 10**6)
    return whole + (2 * rest > 10**6 or (2 * rest == 10**6 and whole % 2 == 1))


PRICE_CHANGES_SQL = """
    SELECT from_at FROM usage_price
    UNION SELECT from_at FROM usage_price_assignment WHERE EXISTS (SELECT FROM usage_price)"""
"""The instants at which any price or assignment begins; none where nothing has a price."""


def price_changes() -> list[Any]:
    """Those of ``PRICE_CHANGES_SQL``, in order."""
    with connection.cursor() as cursor:
        cursor.execute(PRICE_CHANGES_SQL)
        return sorted(at for (at,) in cursor.fetchall())


def price_lists(*, actor: Actor) -> QuerySet[PriceList]:
    return visible(PriceList.objects.prefetch_related("prices").order_by("name"), actor=actor)


def price_fields(price: Price) -> dict[str, Any]:
    return {
        "model": price.model,
        "valid_from": price.valid_from.isoformat(),
        "prompt_micro": price.prompt_micro,
        "output_micro": price.output_micro,
    }


def price_list_fields(row: PriceList) -> dict[str, Any]:
    prices = sorted(row.prices.all(), key=lambda p: (p.model, p.valid_from))
    return {
        "name": row.name,
        "currency": row.currency,
        "timezone": row.timezone,
        "prices": [price_fields(p) for p in prices],
        "managed_by": row.managed_by,
    }


def _prices(checks: Checks, row: PriceList, given: Sequence[Mapping[str, Any]]) -> list[Price]:
    """The prices of a list from what was given; what is wrong goes into ``checks``."""
    if len(given) > MAX_PRICES:
        checks.add("prices", f"are {len(given):,}; at most {MAX_PRICES:,} are allowed")
    found: dict[tuple[str, date], Price] = {}
    for number, each in enumerate(given[:MAX_PRICES], 1):
        model, day = str(each.get("model", "")), each["valid_from"]
        for name in ("prompt_micro", "output_micro"):
            if not 0 <= each[name] <= MAX_PRICE:
                checks.add("prices", f"{number}: {name} must be from 0 to {MAX_PRICE:,}, not {each[name]:,}")
        if len(model) > 200 or not model.isprintable():
            checks.add("prices", f"{number}: a model of at most 200 printable characters, or none for all others")
        if not PRICE_DAYS[0] <= day <= PRICE_DAYS[1]:
            checks.add("prices", f"{number}: valid_from must be from {PRICE_DAYS[0]} to {PRICE_DAYS[1]}, not {day}")
        elif (model, day) in found:
            checks.add("prices", f"{number}: {model or 'all others'} has a price from {day} already")
        elif not checks.fields:
            found[model, day] = Price(
                price_list=row,
                model=model,
                valid_from=day,
                from_at=day_start(day, ZoneInfo(row.timezone)),
                prompt_micro=each["prompt_micro"],
                output_micro=each["output_micro"],
            )
    return list(found.values())


def _check(checks: Checks, row: PriceList) -> None:
    checks.slug("name", row.name)
    checks.manager(row.managed_by)
    check_zone(checks, "timezone", row.timezone)
    if not _CURRENCY.match(row.currency):
        checks.add("currency", f"{row.currency[:10]!r} is no code of three letters, such as EUR")


def _refuse_taken_name(row: PriceList) -> None:
    if PriceList.objects.filter(name=row.name).exclude(pk=row.pk).exists():
        raise Conflict(f"a price list {row.name!r} exists")


@use_case()
def create_price_list(
    *,
    actor: Actor,
    name: str,
    currency: str,
    timezone: str = "UTC",
    prices: Sequence[Mapping[str, Any]] = (),
    managed_by: str = "",
) -> PriceList:
    """A price list; currency and time zone stay for good.

    Args:
        prices: ``model`` ("" for all others), ``valid_from``, ``prompt_micro``, ``output_micro`` each.
        managed_by: as of ``Managed``.
    """
    checks = Checks()
    row = PriceList(name=name, currency=currency, timezone=timezone, managed_by=managed_by)
    _check(checks, row)
    rows = _prices(checks, row, prices)
    checks.done()
    _refuse_taken_name(row)
    row.save(force_insert=True)
    Price.objects.bulk_create(rows)
    record(
        actor=actor, action="price_list.created", object_type="price_list", object_id=row.id,
        after=price_list_fields(row),
    )  # fmt: skip
    return row


@use_case()
def update_price_list(
    *, actor: Actor, price_list_id: str, expected_version: int | None = None, **changes: Unpack[PriceListChanges]
) -> PriceList:
    """Change the name, or all prices at once. Statements that are closed stay as they are."""
    row = lock_version(PriceList.objects.all(), "price list", price_list_id, expected_version)
    before = price_list_fields(row)
    checks = Checks()
    row.name = changes.get("name", row.name)
    row.managed_by = changes.get("managed_by", row.managed_by)
    _check(checks, row)
    given = changes.get("prices")
    rows = None if given is None else _prices(checks, row, given)
    checks.done()
    _refuse_taken_name(row)
    if rows is not None:
        row.prices.all().delete()
        Price.objects.bulk_create(rows)
    after = price_list_fields(row)
    save_change(row, actor=actor, action="price_list.updated", before=before, after=after)
    return row


@use_case()
def delete_price_list(*, actor: Actor, price_list_id: str, expected_version: int | None = None) -> None:
    """Delete a list by which nobody pays."""
    row = lock_version(PriceList.objects.all(), "price list", price_list_id, expected_version)
    before = price_list_fields(row)
    try:
        row.delete()
    except ProtectedError as error:
        number = len({row.tenant_id for row in error.protected_objects})  # type: ignore[attr-defined]
        raise Conflict(f"{number} tenants pay by the price list {row.name!r}") from error
    record(
        actor=actor, action="price_list.deleted", object_type="price_list", object_id=price_list_id, before=before
    )  # fmt: skip
