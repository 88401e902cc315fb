# SPDX-License-Identifier: Apache-2.0
"""How far every preset ends from its peer, as a table in docs/parity.md.

python tests/parity/table.py    run all comparisons and write the table
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = ("preset", "peer", "arithmetic", "case", "difference", "allowed", "theirs")
START, END = "<!-- table -->", "<!-- /table -->"


def rows(cases):
    """What is known of the cases before they are run, and the case itself."""
    return [(c.preset, c.peer, c.products, c.title, c) for c in cases]


def read():
    """The rows of the page."""
    body = PAGE.read_text().split(START)[1].split(END)[0]
    lines = [line for line in body.splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def main():
    from cases import cases

    lines = [HEAD, ("---",) * len(HEAD)]
    for *cells, case in rows(cases()):
        figures = ("" if figure is None else f"{figure:.1e}" for figure in case.worst())
        lines.append((*cells, *figures))
        print(*lines[-1], sep="  ")
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = re.sub(f"{START}.*{END}", f"{START}\n{table}\n{END}", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
