"""Imports point one way, and the light entry points stay light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "transformer_lens", "pandas", "scipy", "plotly", "dash"}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def core_files() -> list[Path]:
    """The files of workbench/ itself, without what its links lead to."""
    links = [path for path in (ROOT / "workbench").iterdir() if path.is_symlink()]
    return [path for path in python_files("workbench") if not any(link in path.parents for link in links)]


def module_name(path: Path) -> str:
    """workbench/config.py is workbench.config, kernels/masks.py is workbench.kernels.masks."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "workbench" else ("workbench", *parts)
    return ".".join(parts)


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports: anywhere in it, or only what runs when it is imported."""
    package = module_name(path).split(".")[:-1]

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if not (at_import_time and deferred):
            for child in ast.iter_child_nodes(node):
                yield from visit(child)

    return visit(ast.parse(path.read_text(encoding="utf-8")))


def is_inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(paths: list[Path], *forbidden: str) -> list[str]:
    found = [(path, name) for path in paths for name in imports(path) if is_inside(name, *forbidden)]
    return [f"{path.relative_to(ROOT)} imports {name}" for path, name in found]


def test_the_folders_are_linked_into_one_namespace() -> None:
    for folder in ("kernels", "analyses", "app"):
        assert (ROOT / "workbench" / folder).resolve() == ROOT / folder
        assert Path(importlib.util.find_spec(f"workbench.{folder}").origin).resolve() == ROOT / folder / "__init__.py"


def test_kernels_import_torch_triton_and_numpy_only() -> None:
    allowed = {"torch", "triton", "numpy", *sys.stdlib_module_names}
    foreign = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed and not is_inside(name, "workbench.kernels")
    ]
    assert not foreign


def test_the_core_imports_neither_analyses_nor_app() -> None:
    core = [path for path in core_files() if path.name not in ("cli.py", "commands.py", "__main__.py")]
    assert core
    assert not offences(core, "workbench.analyses", "workbench.app", "workbench.cli", "workbench.commands")


def test_analyses_import_neither_app_nor_command_line() -> None:
    assert not offences(python_files("analyses"), "workbench.app", "workbench.cli", "workbench.commands")


def test_nobody_imports_the_folders_by_their_top_level_names() -> None:
    everywhere = core_files() + python_files("kernels", "analyses", "app", "benchmarks", "tests")
    assert not offences(everywhere, "kernels", "analyses", "app")


def test_only_hooks_imports_transformer_lens_when_it_is_imported() -> None:
    importers = [
        path.relative_to(ROOT).as_posix()
        for path in core_files() + python_files("kernels", "analyses", "app")
        if any(is_inside(name, "transformer_lens") for name in imports(path, at_import_time=True))
    ]
    assert importers == ["workbench/hooks.py"]


@pytest.mark.parametrize(
    "code",
    ["import workbench", "import sys, workbench.cli as c; sys.argv = ['workbench', '--help']; c.main()"],
    ids=["import workbench", "workbench --help"],
)
def test_light_entry_points_import_nothing_heavy(code: str, tmp_path: Path) -> None:
    report = "import atexit, sys; atexit.register(lambda: print('\\nimported:', *sys.modules));"
    done = subprocess.run(
        [sys.executable, "-c", report + code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.rpartition("imported:")[2].split())
    assert "workbench" in loaded
    assert not loaded & HEAVY


def test_every_public_name_resolves() -> None:
    for name in workbench.__all__:
        assert getattr(workbench, name) is not None
        assert name in dir(workbench)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        workbench.nonsense  # noqa: B018


def test_our_kernels_are_not_taken_for_hugging_faces(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or ROOT not in Path(spec.origin or "").resolve().parents
    code = "from transformers.utils import is_kernels_available as available; import sys; sys.exit(available())"
    has_the_real_one = spec is not None
    for folder in (ROOT, tmp_path):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
        assert bool(done.returncode) == has_the_real_one, done.stderr
