"""Frame rates and settings are read exactly or refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lowmem_core.errors import RequestError
from lowmem_core.write import VideoSettings, parse_fps


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (24, Fraction(24)),
        ("16", Fraction(16)),
        (12.5, Fraction(25, 2)),
        (23.976, Fraction(24000, 1001)),
        ("23.98", Fraction(24000, 1001)),
        (24000 / 1001, Fraction(24000, 1001)),
        ("29.97", Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        ("24000/1001", Fraction(24000, 1001)),
        (Fraction(2997, 100), Fraction(2997, 100)),
        (" 30.0 ", Fraction(30)),
    ],
)
def test_frame_rates_are_exact(value: object, expected: Fraction) -> None:
    """Rounded NTSC rates become the true fraction, everything else stays what it says."""
    assert expected == parse_fps(value)


@pytest.mark.parametrize(
    "value", [0, -1, float("nan"), float("inf"), "", "fast", "1/0", "nan", 1001, True, None, 1e-30]
)
def test_impossible_frame_rates_are_refused(value: object) -> None:
    """A frame rate that no player could show says what would have worked."""
    with pytest.raises(RequestError, match="frames per second above 0"):
        parse_fps(value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fps", 0, "frame rate"),
        ("codec", "vp9", "one of h264, hevc, av1"),
        ("preset", "warp", "ultrafast"),
        ("bit_depth", 12, "one of 8, 10"),
        ("crf", 52, "0 to 51"),
        ("crf", -1, "0 to 51"),
        ("metadata", {"prompt": {"1": 2}}, "json.dumps"),
        ("metadata", {"": "x"}, "text for every key"),
    ],
)
def test_impossible_settings_are_refused(name: str, value: object, words: str) -> None:
    """Each setting is checked when the settings are made, not when the first frame arrives."""
    with pytest.raises(RequestError, match=words):
        VideoSettings(**{"fps": 24, name: value})


def test_settings_turn_a_number_into_a_rate() -> None:
    """A plain number is accepted as frame rate."""
    assert Fraction(30000, 1001) == VideoSettings(fps=29.97).fps
