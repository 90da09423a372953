"""How the report writes numbers."""

TIMES = "\N{MULTIPLICATION SIGN}"
_MINUS = "\N{MINUS SIGN}"
_NONE = "\N{EN DASH}"


def number(value: float | None, digits: int = 2) -> str:
    """With separators for thousands; a dash for what was not measured."""
    return _NONE if value is None else f"{value:,.{digits}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """With its sign; zero has none."""
    if value is None:
        return _NONE
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return f"{_MINUS if value < 0 else '+'}{text}"


def probability(value: float) -> str:
    """A p-value."""
    return f"{value:.4f}" if value >= 0.001 else f"{value:.2e}"


def count(value: int) -> str:
    """A whole number with separators for thousands."""
    return f"{value:,}"


def megabytes(value: int) -> str:
    """Bytes in units of 1,000,000."""
    return f"{value / 1e6:,.1f}"


def short(digest: str) -> str:
    """The start of a digest, enough to tell it from the others of a report."""
    return digest.removeprefix("sha256:")[:12]
