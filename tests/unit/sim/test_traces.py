"""Traces from a user's file, and what is said when one cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from router_ext.errors import SimulationError
from router_ext.sim.engine import Run
from router_ext.sim.suites import SuiteChoice
from router_ext.sim.traces import conversation_lengths, read_trace

GOOD = "t_s,client,input_tokens,output_tokens,comment\n5.5,b,10,20,x\n3,a,7,8,\n9,b,1,1,\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_rows_are_sorted_and_count_from_the_first(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path / "t.csv", GOOD))
    assert [tuple(row) for row in rows] == [(0.0, "a", 7, 8), (2.5, "b", 10, 20), (6.0, "b", 1, 1)]


def test_a_compressed_file_with_a_byte_order_mark_and_no_clients(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress("\ufefft_s, input_tokens ,output_tokens\r\n0,1,2\r\n\r\n1,3,4\r\n".encode()))
    assert [tuple(row) for row in read_trace(path)] == [(0.0, "client0", 1, 2), (1.0, "client0", 3, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv: the first row lacks the columns t_s, input_tokens, output_tokens \(it has: nothing\)"),
        ("t_s,input_tokens\n", r"lacks the column output_tokens \(it has: t_s, input_tokens\)"),
        ("t_s,input_tokens,output_tokens\n", "no rows below the header"),
        ("t_s,input_tokens,output_tokens\n0,1\n", "row 2: 2 cells, the header has 3"),
        ("t_s,input_tokens,output_tokens\n0,1,1\nsoon,1,1\n", "row 3, column t_s: 'soon' is not a number of seconds"),
        ("t_s,input_tokens,output_tokens\nnan,1,1\n", "row 2, column t_s: 'nan'"),
        ("t_s,input_tokens,output_tokens\n0,1.5,1\n", "row 2, column input_tokens: '1.5' is not a whole number from 1"),
        ("t_s,input_tokens,output_tokens\n0,1,0\n", "column output_tokens: '0' is not a whole number from 1 to 1,000"),
        ("t_s,input_tokens,output_tokens\n0,1,2000000\n", "column output_tokens: '2000000'"),
        ("t_s,input_tokens,output_tokens,client\n0,1,1,\n", "column client: '' is not a name of 1 to 64"),
        ("t_s,input_tokens,output_tokens\n7,1,1\n7,1,1\n", "first and last arrival are 0 s apart"),
        ("t_s,input_tokens,output_tokens\n0,1,1\n1e10,1,1\n", r"1e\+10 s apart \(above 0 to 2,678,400 s\)"),
        ('t_s,input_tokens,output_tokens\n0,1,"1\n', "row 2"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        read_trace(write(tmp_path / "t.csv", text))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(SimulationError, match="not a gzip file"):
        read_trace(write(tmp_path / "t.csv.gz", GOOD))
    damaged = bytearray(gzip.compress(GOOD.encode(), mtime=0))
    damaged[10] = 0xFF  # the first byte after the header: a block of no known kind
    (tmp_path / "t.csv.gz").write_bytes(damaged)
    with pytest.raises(SimulationError, match="not a gzip file"):
        read_trace(tmp_path / "t.csv.gz")
    (tmp_path / "b.csv").write_bytes(b"t_s\xff\n")
    with pytest.raises(SimulationError, match="byte 3 is not UTF-8"):
        read_trace(tmp_path / "b.csv")


def test_the_suite_has_a_tenant_per_client_and_refuses_what_no_server_holds(tmp_path: Path) -> None:
    text = "t_s,client,input_tokens,output_tokens\n0,b,100,9000\n1,a,55904,5\n2,a,55905,5\n30,a,10,5\n"
    suite = SuiteChoice(name="trace", file=write(tmp_path / "t.csv", text)).build()
    assert [client.name for client in suite.clients] == ["a", "b"]
    run = Run(suite, "slo-fair", 1).run()
    assert run.end_s == 30.0
    requests = run.requests
    assert requests.tenant == [1, 0, 0, 0]
    # 55,904 and 4,096 more are exactly the KV of a server; one more is refused and counted.
    assert requests.is_refused == [False, False, True, False]
    assert requests.wanted_tokens == [4_096, 5, 5, 5]
    assert requests.finish_s[1] is not None


def test_lengths_of_real_conversations_come_with_the_product() -> None:
    pairs = conversation_lengths()
    assert len(pairs) == 19_365
    assert all(inputs >= 1 and outputs >= 1 and inputs + outputs < 9_000 for inputs, outputs in pairs)
