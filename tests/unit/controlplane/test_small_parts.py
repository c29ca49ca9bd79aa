"""Ids, instants, tokens, CSV cells."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.common.clock import from_us, to_us
from controlplane.common.ids import new_id
from controlplane.common.secrets import generate_token, is_token
from controlplane.common.spreadsheet import safe_text


def test_ids_carry_their_type_sort_by_time_and_differ() -> None:
    ids = [new_id("ten") for _ in range(1_000)]
    assert all(len(i) == 24 and i.startswith("ten_") for i in ids)
    assert len(set(ids)) == 1_000
    assert ids[0][:13] <= ids[-1][:13]


@given(st.datetimes(timezones=st.just(UTC)))
def test_instants_survive_the_wire_exactly(instant: datetime) -> None:
    assert from_us(to_us(instant)) == instant


def test_a_token_is_known_by_its_checksum_and_prefix() -> None:
    token, public_id = generate_token("flt")
    assert public_id in token
    assert is_token(token, "flt")
    assert not is_token(token, "flr")
    assert not is_token(token[:-1] + ("0" if token[-1] != "0" else "1"), "flt")
    assert not is_token(token + "\n", "flt")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1"])
def test_no_cell_begins_a_formula(text: str) -> None:
    assert safe_text(text) == "'" + text


def test_harmless_cells_stay_as_they_are() -> None:
    assert safe_text("Chatbot = fine") == "Chatbot = fine"


def test_every_scheduled_task_exists() -> None:
    from controlplane.celery import app

    app.loader.import_default_modules()
    scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
    assert scheduled <= set(app.tasks)
    assert len(scheduled) == len(app.conf.beat_schedule)
