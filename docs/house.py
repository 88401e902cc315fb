# SPDX-License-Identifier: Apache-2.0
"""The floor plan of the package, drawn from the table in the docstring of fmuon/__init__.py."""

import re
import textwrap
from html import escape
from itertools import groupby

import fmuon

_ROOM, _HEIGHT, _GAP, _LEFT, _PER_ROW = 188, 66, 8, 74, 5
_WIDTH = _LEFT + _PER_ROW * (_ROOM + _GAP) + _GAP
_COLOURS = ("#e8eef7", "#f7f1e6")


def floors() -> list[tuple[int, list[tuple[str, str]]]]:
    """(floor, its rooms with their jobs), the ground floor first."""
    rows = re.findall(r"^(\d+) \| (\w+) \| (.+)$", fmuon.__doc__ or "", re.MULTILINE)
    return [
        (floor, [(name, job) for _, name, job in rooms])
        for floor, rooms in groupby(((int(f), name, job) for f, name, job in rows), lambda r: r[0])
    ]


def drawn() -> str:
    """The house as an SVG, the ground floor at the bottom."""
    parts: list[str] = []
    top = _GAP
    for floor, rooms in reversed(floors()):
        rows = -(-len(rooms) // _PER_ROW)
        height = rows * (_HEIGHT + _GAP) + _GAP
        colour = _COLOURS[floor % 2]
        parts.append(
            f'<rect x="{_GAP}" y="{top}" width="{_WIDTH - 2 * _GAP}" height="{height}" '
            f'fill="{colour}"/>\n'
            f'<text x="{2 * _GAP}" y="{top + height / 2 + 5:g}" class="floor">floor {floor}</text>'
        )
        for place, (name, job) in enumerate(rooms):
            row, column = divmod(place, _PER_ROW)
            x, y = _LEFT + column * (_ROOM + _GAP), top + _GAP + row * (_HEIGHT + _GAP)
            parts.append(_room(x, y, name, job))
        top += height + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
        'aria-label="The modules of fmuon by floor">\n'
        "<style>text { font-family: sans-serif; fill: #222; } .floor { font-size: 13px; } "
        ".name { font-size: 13px; font-weight: bold; } .job { font-size: 10px; }</style>\n"
        f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _room(x: int, y: int, name: str, job: str) -> str:
    lines = textwrap.wrap(job, 32)
    if len(lines) > 3:
        lines = [*lines[:2], f"{lines[2][:28]} ..."]
    text = "".join(
        f'<text x="{x + 7}" y="{y + 32 + 12 * i}" class="job">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{_ROOM}" height="{_HEIGHT}" fill="#fff" stroke="#667"/>'
        f'<text x="{x + 7}" y="{y + 17}" class="name">{escape(name)}</text>{text}'
    )
