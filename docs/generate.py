# SPDX-License-Identifier: Apache-2.0
"""Pages -> pages: what code and records say is written into them, so that they can't drift.

    python docs/generate.py     rewrites every page that is stale

Three things are generated. Between the markers `<!-- name -->` and `<!-- /name -->` stands the
table of that name: of the code (`catalogue.py`) or of recorded measurements
(`benchmarks/tables.py`). A ```text block behind a ```python block holds what that block prints, in
a namespace that all blocks of a page share. `house.svg` is drawn from the floor plan (`house.py`).

Blocks that can't run everywhere (several processes, a GPU, another package) are marked ```py, and
are not run. tests/test_documents.py fails where a page differs from what this script would write.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FOLDERS = [str(DOCS), str(ROOT / "benchmarks")]
sys.path[:0] = FOLDERS

import catalogue  # noqa: E402
import house  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

# Other programs, such as the tests, have modules of the same names.
del sys.path[: len(FOLDERS)]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> dict[str, Path]:
    """Name -> page, of all that are generated in part."""
    paths = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md"))]
    return {str(path.relative_to(ROOT)): path for path in paths}


def main() -> None:
    """Write anew what is stale."""
    warnings.simplefilter("error")
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    for name, path in pages().items():
        text = path.read_text()
        with tempfile.TemporaryDirectory() as folder, _inside(folder):
            new = executed(tabulated(text), name)
        _write(path, text, new)
    drawing = DOCS / "house.svg"
    _write(drawing, drawing.read_text() if drawing.exists() else "", house.drawn())


def _write(path: Path, old: str, new: str) -> None:
    if new != old:
        path.write_text(new)
        print(f"written: {path.relative_to(ROOT)}")


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def tabulated(text: str) -> str:
    """The page with the tables of today between its markers."""
    text = tables.rendered(text)
    for name, table in catalogue.TABLES.items():
        if f"<!-- {name} -->" in text:
            text = tables.between(text, name, table())
    return text


def executed(text: str, name: str) -> str:
    """The page with what its blocks print today."""
    # torch.compile looks the globals of a function up in its module.
    module = types.ModuleType(re.sub(r"\W", "_", name))
    sys.modules[module.__name__] = module
    parts: list[str] = []
    end, printed = 0, ""
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        parts.append(text[end : block.start()])
        end = block.end()
        if language == "text":
            parts.append(f"```text\n{printed}```")
            printed = ""
            continue
        if printed:
            raise SystemExit(f"{name}: no ```text block for what is printed: {printed:.99}")
        parts.append(block.group())
        if language == "python":
            printed = _run(body, module, f"{name}, line {text[: block.start()].count(chr(10)) + 2}")
    if printed:
        raise SystemExit(f"{name}: no ```text block for what is printed: {printed:.99}")
    del sys.modules[module.__name__]
    return "".join(parts) + text[end:]


def _run(body: str, module: types.ModuleType, where: str) -> str:
    """What a block prints, each block with the same random numbers."""
    output = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(output):
        exec(compile(body, where, "exec"), module.__dict__)
    printed = "\n".join(line.rstrip() for line in output.getvalue().strip("\n").splitlines())
    return f"{printed}\n" if printed else ""


if __name__ == "__main__":
    main()
