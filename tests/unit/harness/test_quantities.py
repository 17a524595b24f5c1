"""Durations, sizes and rates are parsed and formatted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultbed.harness.quantities import format_bytes, format_duration, format_rate
from faultbed.testbed.units import RATE, SIZE, TIME, parse_duration_ns, parse_rate_bps, parse_share, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8s", 8_000_000_000),
        ("500ms", 500_000_000),
        ("2m", 120_000_000_000),
        ("1.5s", 1_500_000_000),
        ("0s", 0),
    ],
)
def test_durations_are_read_exactly(text, expected):
    assert parse_duration_ns(text) == expected


@pytest.mark.parametrize("text", ["8", "", "s", "-1s", "1 fortnight", "1.5ns", "8S", "1e3s", "nan s", "٣s"])
def test_duration_without_a_valid_unit_is_rejected(text):
    with pytest.raises(ValueError, match='"'):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64KiB", 65536), ("16MiB", 1 << 24), ("1GB", 10**9), ("4096B", 4096), ("4096bytes", 4096), ("1.5KiB", 1536)],
)
def test_sizes_are_read_exactly(text, expected):
    assert parse_size_bytes(text) == expected


@pytest.mark.parametrize(
    ("parse", "sentence"),
    [
        (parse_duration_ns, '2 has no unit; write "2s", or another of ns, us, ms, m, h, d'),
        (parse_size_bytes, '2 has no unit; write "2B", or another of kB, MB, GB, KiB, MiB, GiB'),
        (parse_rate_bps, '2 has no unit; write "2Mb/s", or another of b/s, kb/s, Gb/s, Tb/s'),
    ],
)
def test_number_without_unit_is_refused_with_a_unit_that_may_be_meant(parse, sentence):
    for text in ("2", " 2 "):
        with pytest.raises(ValueError, match="has no unit") as refused:
            parse(text)
        assert str(refused.value) == sentence


@given(st.integers(min_value=0, max_value=10**15))
def test_duration_of_whole_nanoseconds_round_trips(value):
    assert parse_duration_ns(f"{value}ns") == value


@given(st.floats(min_value=0, max_value=1e18))
def test_formatting_never_fails_and_names_a_unit(value):
    assert " " in format_duration(value)
    assert " " in format_bytes(value)
    assert format_rate(value).endswith("b/s")


def test_quantity_formats_are_short_and_have_a_unit():
    assert format_duration(1_300_000_000) == "1.3 s"
    assert format_duration(77_000_000) == "77 ms"
    assert format_duration(12_340_000_000) == "12.3 s"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_rate(150_000_000 / 8) == "150 Mb/s"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("400Gb/s", 400e9), ("20Mb/s", 20e6), ("100Mbit/s", 1e8), ("1.5kb/s", 1500.0), ("8 b/s", 8.0)],
)
def test_rates_are_read_exactly(text, expected):
    assert parse_rate_bps(text) == expected


@pytest.mark.parametrize("text", ["20Mb", "20MB/s", "-1Mb/s", "1e3Mb/s", "", "nan Mb/s", "20%"])
def test_rate_without_a_valid_unit_is_rejected(text):
    with pytest.raises(ValueError, match='such as "400Gb/s"'):
        parse_rate_bps(text)


@pytest.mark.parametrize("parse", [parse_duration_ns, parse_size_bytes, parse_rate_bps, parse_share])
def test_quantity_that_no_machine_has_is_rejected(parse):
    unit = {parse_duration_ns: "s", parse_size_bytes: "GB", parse_rate_bps: "Gb/s", parse_share: ""}[parse]
    with pytest.raises(ValueError, match=r"is (not a|too large for a) "):
        parse("9" * 400 + unit)


def test_shares_are_percentages_or_numbers():
    assert (parse_share("20%"), parse_share("0.2"), parse_share("0.5 %")) == (0.2, 0.2, 0.005)
    with pytest.raises(ValueError, match='such as "20%"'):
        parse_share("20ms")


@given(st.sampled_from([TIME, SIZE, RATE]), st.integers(min_value=0, max_value=10**18))
def test_quantity_that_is_formatted_is_read_back_exactly(quantity, value):
    assert quantity.parse_whole(quantity.format(value)) == value


def test_quantity_is_formatted_in_its_shortest_spelling():
    assert (SIZE.format(65536), SIZE.format(10**9), TIME.format(250_000_000)) == ("64KiB", "1GB", "250ms")
    assert (TIME.format(0), SIZE.format(1), RATE.format(20_000_000)) == ("0s", "1B", "20Mb/s")
