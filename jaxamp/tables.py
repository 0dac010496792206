"""Rows of text as aligned lines."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, each column as wide as its widest cell.

    >>> table([("op", "n"), ("dot_general", "2")])
    ['op           n', 'dot_general  2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
