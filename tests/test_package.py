"""The package as it is installed: one name a file, honest `__all__`, cheap imports, errors as they are drawn."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

import kvcascade
from kvcascade import errors

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "kvcascade"
HEAVY = ["torch", "boto3", "botocore", "lmdb", "redis", "matplotlib", "rich", "numpy"]

FACADES = [
    "kvcascade",
    "kvcascade.configs",
    "kvcascade.errors",
    "kvcascade.manager",
    "kvcascade.tiers",
    "kvcascade.types",
]


def modules() -> list[str]:
    """The names of all modules of the package, but scripts."""
    found = pkgutil.walk_packages(kvcascade.__path__, "kvcascade.")
    return ["kvcascade", *(module.name for module in found if not module.name.endswith("__main__"))]


def imported(name: str) -> ModuleType | None:
    """The module; None where it needs vLLM, which is not here."""
    try:
        return importlib.import_module(name)
    except (errors.ConfigError, ModuleNotFoundError) as error:
        if importlib.util.find_spec("vllm") or "vllm" not in str(error).lower():
            raise
        return None


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after this code has run in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_no_file_is_imported_under_two_names() -> None:
    ours_loaded = [name for name in modules() if imported(name)]
    home = Path(kvcascade.__file__).resolve().parent
    homes = [home, *(path.resolve() for path in home.iterdir() if path.is_symlink())]
    files = Counter(
        Path(file).resolve()
        for name, module in list(sys.modules.items())
        if name != "__main__" and (file := getattr(module, "__file__", None))
    )
    ours = {file: count for file, count in files.items() if any(file.is_relative_to(place) for place in homes)}
    assert len(ours) >= len(ours_loaded) - 1
    assert [file for file, count in ours.items() if count > 1] == []


@pytest.mark.parametrize("name", ["configs", "connector", "manager", "tiers"])
def test_each_folder_at_the_root_is_linked_into_the_package(name: str) -> None:
    link = SOURCES / name
    if not SOURCES.is_dir():
        pytest.skip("the sources are not here: this runs against an installed package")
    assert link.readlink() == Path("..", "..", name)
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", FACADES)
def test_all_is_what_is_public(name: str) -> None:
    """Of a package: what it imports from its modules; of a module: what it defines."""
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert [member for member in module.__all__ if not hasattr(module, member)] == []
    lazy = set(vars(module).get("_HOMES", {}))
    assert public(module) | lazy == set(module.__all__) - {"__version__"}


def public(module: ModuleType) -> set[str]:
    """The names without an underscore that the module's own text binds."""
    names: set[str] = set()
    for part in ast.parse(Path(str(module.__file__)).read_text()).body:
        match part:
            case ast.ImportFrom(level=1):
                names.update(name.asname or name.name for name in part.names)
            case ast.ClassDef() | ast.FunctionDef():
                names.add(part.name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign():
                names.update(target.id for target in part.targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", modules())
def test_what_a_module_offers_is_there(name: str) -> None:
    module = imported(name)
    if module is None:
        pytest.skip("needs vLLM")
    assert [member for member in getattr(module, "__all__", []) if not hasattr(module, member)] == []


@pytest.mark.parametrize("name", ["kvcascade", "kvcascade.tiers", "kvcascade.configs", "kvcascade.manager"])
def test_imports_are_cheap(name: str) -> None:
    loaded = loaded_by(f"import {name}")
    assert name in loaded
    assert loaded.intersection(HEAVY) == set()


def test_the_package_alone_loads_no_pydantic() -> None:
    assert "pydantic" not in loaded_by("import kvcascade")


@pytest.mark.parametrize("point", [point.name for point in entry_points(group="kvcascade.tiers")])
def test_the_settings_of_a_tier_load_no_driver(point: str) -> None:
    loaded = loaded_by(
        "from kvcascade.configs.registry import TIERS, resolve; "
        f"assert resolve(TIERS, {point!r}).model_fields['type'].default == {point!r}"
    )
    assert loaded.intersection(HEAVY) == set()


def test_the_errors_are_those_that_are_drawn() -> None:
    """The tree in the docstring: each name stands one level right of its base."""
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]*)([A-Z]\w+)( {2,}\S|$)", line)
        if match:
            depth = len(match[1]) // 4
            above[depth] = match[2]
            drawn[match[2]] = above.get(depth - 1, "Exception")
    classes = {name: getattr(errors, name) for name in errors.__all__}
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in classes.items()}
