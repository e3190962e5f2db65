"""The built distributions hold everything, and work where the repository is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("workbench", "kernels", "analyses", "app")
NOT_SHIPPED = (".*", "*.egg-info", "build", "dist", "__pycache__", "notebooks", "benchmarks", "tests")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds the source distribution and, from it, the wheel: (sdist, wheel)."""
    folder = tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "built", folder / "source", cwd=folder)
    return next((folder / "built").glob("*.tar.gz")), next((folder / "built").glob("*.whl"))


def shipped_files() -> set[str]:
    """Every file of the four folders, under the name it has in the wheel."""
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    names = {path.resolve().relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    return {name if name.startswith("workbench/") else f"workbench/{name}" for name in names}


def test_distributions_hold_every_file(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert in_wheel == shipped_files()
    assert in_wheel <= in_sdist


def test_the_wheel_works_outside_the_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    run(*install, distributions[1], cwd=tmp_path)
    code = """
import workbench.analyses, workbench.app, workbench.kernels
from workbench import HookedTransformer
print(*(module.__file__ for module in (workbench, workbench.analyses, workbench.app, workbench.kernels)))
assert HookedTransformer.from_pretrained("demo")("Once").isfinite().all()
"""
    printed = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert all(site in Path(file).parents for file in printed.split())
    assert "usage" in run(site / "bin" / "workbench", "--help", cwd=tmp_path, PYTHONPATH=str(site)).lower()
