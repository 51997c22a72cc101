"""Sizes and durations, as people write them."""

import math

import pytest

from kvcascade.configs.units import format_duration, format_size, parse_duration, parse_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (5368709120, 5 * GIB),
        ("5368709120", 5 * GIB),
        ("5GiB", 5 * GIB),
        ("5 GiB", 5 * GIB),
        ("5GB", 5_000_000_000),
        ("1.5KiB", 1536),
        ("0.5MB", 500_000),
        (4096.0, 4096),
        ("12B", 12),
        (0, 0),
        ("0", 0),
        ("7PiB", 7 << 50),
    ],
)
def test_a_size_is_bytes(written: object, size: int) -> None:
    """LMCache/LMCache#1244: a number, the same in quotes, and a unit mean the same."""
    assert parse_size(written) == size


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (-1, "expected a size such as 512MiB, 8GiB or 5GB; finite, not negative"),
        ("-1", "expected a size such as 512MiB, 8GiB or 5GB"),
        ("", "expected a size such as 512MiB, 8GiB or 5GB"),
        (None, "expected a size such as 512MiB, 8GiB or 5GB"),
        ("abc", "expected a size such as 512MiB, 8GiB or 5GB"),
        (True, "expected a size such as 512MiB, 8GiB or 5GB"),
        ([1], "expected a size such as 512MiB, 8GiB or 5GB"),
        (math.nan, "expected a size such as 512MiB, 8GiB or 5GB; finite, not negative"),
        (math.inf, "expected a size such as 512MiB, 8GiB or 5GB; finite, not negative"),
        ("nan", "expected a size such as 512MiB, 8GiB or 5GB"),
        ("1e9", "expected a size such as 512MiB, 8GiB or 5GB"),
        ("5gb", "unknown unit 'gb' (did you mean GB?); allowed: KiB, MiB, GiB, TiB, PiB, B, KB, MB, GB, TB, PB"),
        ("5G", "unknown unit 'G' (did you mean GB?); allowed: KiB, MiB, GiB, TiB, PiB, B, KB, MB, GB, TB, PB"),
        ("5parsec", "unknown unit 'parsec'; allowed: KiB, MiB, GiB, TiB, PiB, B, KB, MB, GB, TB, PB"),
        ("1.5B", "'1.5B' is not a whole number of bytes"),
        ("0.3", "'0.3' is not a whole number of bytes"),
        ("9000PiB", "expected less than 8 EiB"),
        ("9" * 400 + ".0GiB", "expected less than 8 EiB"),
    ],
)
def test_what_is_no_size_is_refused(written: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(written)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1.5h", 5400.0),
        ("24h", 86400.0),
        ("1d", 86400.0),
        ("50us", 5e-5),
        (0, 0.0),
        ("0", 0.0),
    ],
)
def test_a_duration_is_seconds(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (5, "5 has no unit; allowed: us, ms, s, m, h, d"),
        ("5", "'5' has no unit; allowed: us, ms, s, m, h, d"),
        ("5 parsec", "unknown unit 'parsec'; allowed: us, ms, s, m, h, d"),
        ("5S", "unknown unit 'S' (did you mean s?); allowed: us, ms, s, m, h, d"),
        ("5sec", "unknown unit 'sec' (did you mean s?); allowed: us, ms, s, m, h, d"),
        (-2, "expected a duration such as 500ms, 2s or 24h; finite, not negative"),
        (math.nan, "expected a duration such as 500ms, 2s or 24h; finite, not negative"),
        (False, "expected a duration such as 500ms, 2s or 24h"),
        (None, "expected a duration such as 500ms, 2s or 24h"),
        ("soon", "expected a duration such as 500ms, 2s or 24h"),
    ],
)
def test_what_is_no_duration_is_refused(written: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_duration(written)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * GIB, "5 GiB"), (3 << 60, "3072 PiB")]
)
def test_a_size_is_shown_short(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.5, "500ms"), (2, "2s"), (90, "1.5m"), (86400, "1d"), (5e-5, "50us")]
)
def test_a_duration_is_shown_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
