"""Sizes, durations and times as people read them: one form of each in all messages."""

import datetime

_PREFIXES = {
    "T": 1e12,
    "G": 1e9,
    "M": 1e6,
    "k": 1e3,
    "": 1.0,
    "m": 1e-3,
    "u": 1e-6,
    "n": 1e-9,
}


def format_scaled(number: float | None, unit: str) -> str:
    """Returns a number with three digits and a prefix: `1.24 MB`, `3.5 ms`, `0 B`."""
    if not number:
        return f"0 {unit}"
    fitting = (each for each in _PREFIXES.items() if number >= 0.9995 * each[1])
    prefix, scale = next(fitting, ("n", 1e-9))
    return f"{number / scale:.3g} {prefix}{unit}"


def format_bytes(number: float | None) -> str:
    """Returns a number of bytes with three digits, such as `1.24 MB`."""
    return format_scaled(number, "B")


def format_seconds(seconds: float) -> str:
    """Returns a duration: `12.5 s`, of an integer `12 s`, `1 min 5 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    large, small, units = *divmod(int(seconds), 60), ("min", "s")
    if large >= 60:
        large, small, units = *divmod(large, 60), ("h", "min")
    rest = f" {small} {units[1]}" if small else ""
    return f"{large} {units[0]}{rest}"


def format_time(seconds: float | None) -> str:
    """Returns a time since the epoch, to the minute and of this place; `""` of none."""
    if seconds is None:
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
