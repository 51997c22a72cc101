"""Fails unless a wheel holds exactly the package's files: compare_wheel.py SOURCE_TREE WHEEL."""

import sys
import zipfile
from pathlib import Path


def in_tree(root: Path) -> set[str]:
    """The package's files; the four folders at the root count as its own, as the links say."""
    package = root / "src" / "kvcascade"
    found = {f"kvcascade/{file.relative_to(package)}" for file in package.rglob("*") if file.is_file()}
    for link in (entry for entry in package.iterdir() if entry.is_symlink()):
        folder = link.resolve()
        found |= {
            f"kvcascade/{link.name}/{file.relative_to(folder)}" for file in folder.rglob("*") if file.is_file()
        }
    return found


def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


tree, wheel = in_tree(Path(sys.argv[1])), in_wheel(Path(sys.argv[2]))
if tree != wheel:
    sys.exit(f"not in the wheel: {sorted(tree - wheel)}\nonly in the wheel: {sorted(wheel - tree)}")
print(f"{len(wheel)} files, as in the source tree")
