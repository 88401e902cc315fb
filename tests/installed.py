# SPDX-License-Identifier: Apache-2.0
"""Try the fmuon that is installed: `python -I tests/installed.py dist/FILE`, by `make dist`.

The file must hold what belongs to it, and the package must come from where it was installed.
"""

import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import torch

import fmuon


def names_in(archive):
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    return [name.split("/", 1)[-1] for name in tarfile.open(archive).getnames()]


def main():
    archive = Path(sys.argv[1])
    names = names_in(archive)
    wanted = ["fmuon/py.typed", "fmuon/functional.py"]
    if archive.suffix != ".whl":
        wanted += ["LICENSE", "README.md", "CHANGELOG.md", "docs/index.md", "tests/installed.py"]
    missing = [name for name in wanted if name not in names]
    assert not missing, missing
    assert any(name.endswith("LICENSE") for name in names), "no LICENSE"
    if archive.suffix == ".whl":
        assert not [name for name in names if not name.startswith("fmuon")], names

    package = Path(fmuon.__file__).parent
    assert "site-packages" in package.parts, package
    assert (package / "py.typed").exists()
    assert metadata.version("fmuon") == fmuon.__version__
    assert [r for r in metadata.requires("fmuon") if "extra" not in r] == ["torch>=2.11"]

    params = {"w": torch.ones(4, 8), "b": torch.zeros(4)}
    updates, _ = fmuon.update(params, fmuon.init(params), 0)
    assert fmuon.apply_updates(params, updates)["w"].isfinite().all()
    print(f"{archive.name}: {len(names)} files, fmuon {fmuon.__version__} works")


if __name__ == "__main__":
    main()
