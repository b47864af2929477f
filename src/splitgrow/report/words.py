"""Numbers as people read them."""

from __future__ import annotations

MISSING = "–"


def whole(number: int | None) -> str:
    """``12,345``, or a dash."""
    return MISSING if number is None else f"{number:,}"


def brief(number: int | None) -> str:
    """``12,345``, ``14.5M``, ``28.3G``: as many digits as a table has room for."""
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number is not None and number >= size:
            return f"{number / size:.3g}{sign}"
    return whole(number)


def short(number: float | None, digits: int = 4) -> str:
    """Few digits, with a true minus sign: ``0.9312``, ``−1.2e-5``; or a dash."""
    if number is None:
        return MISSING
    text = f"{number:.{digits}g}"
    return text.replace("-", "−", 1) if number < 0 else text


def times(before: float | None, after: float | None) -> str | None:
    """``4.6 times``; None where there is no ratio to speak of."""
    if not before or after is None:
        return None
    ratio = after / before
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:,.0f} times"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
