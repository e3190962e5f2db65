"""The documents say what is so: their commands exist, their examples run, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import workbench.analyses
from workbench.analyses.attention.scores import SCORES
from workbench.kernels import StatisticsRequest
from workbench.loading.families import FAMILIES
from workbench.loading.families.native import MODEL_TYPE

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def readme_commands() -> list[list[str]]:
    """Every command line of the README without its comment, as words."""
    lines = [line.split("#")[0].split() for block in code_blocks("sh") for line in block.splitlines()]
    return [words for words in lines if words]


def test_the_first_screen_says_what_it_is_and_shows_the_two_commands_and_the_dashboard() -> None:
    screen = "\n".join(README.splitlines()[:16])
    parts = ("# Attention Workbench", "make app", "make test", "docs/screenshot.png")
    positions = [screen.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    seen = set()
    for program, verb, *rest in readme_commands():
        seen.add(program)
        if program == "make":
            assert re.search(rf"^{verb}:", makefile, flags=re.MULTILINE), verb
        else:
            assert program == "workbench"
            code = "import sys; from workbench.cli import main; sys.exit(main())"
            usage = subprocess.run([sys.executable, "-c", code, verb, "--help"], capture_output=True, text=True)
            assert usage.returncode == 0, usage.stderr
            for option in [word for word in rest if word.startswith("--")]:
                assert option in usage.stdout, f"workbench {verb} has no {option}"
    assert seen == {"make", "workbench"}


def test_python_examples_of_the_readme_run(tmp_path: Path) -> None:
    examples = "\n".join(code_blocks("python"))
    assert "from_pretrained" in examples
    done = subprocess.run([sys.executable, "-c", examples], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "induction.html").stat().st_size > 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_statistic_is_defined_and_every_analysis_introduced() -> None:
    definitions = (ROOT / "docs" / "definitions.md").read_text(encoding="utf-8")
    for name in [*StatisticsRequest.__dataclass_fields__, *SCORES]:
        assert f"`{name}`" in definitions, f"docs/definitions.md does not define {name}"
    for name in workbench.analyses.__all__:
        if name.islower():
            assert name in README, f"README.md does not mention the analysis {name}"


def test_every_family_has_a_measured_row() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Families")[2]
    rows = re.findall(r"^\| (\w+) \|.*\| (\S+) \| (\S+) \| (\S+) \|$", table, flags=re.MULTILINE)
    assert {row[0] for row in rows} - {"model_type"} == FAMILIES.keys() - {MODEL_TYPE}
    assert all(float(error) < 1e-4 for row in rows if row[0] != "model_type" for error in row[1:] if error != "–")


def test_every_dependency_has_its_reason_and_its_pin() -> None:
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    extras = PROJECT["optional-dependencies"]
    requirements = PROJECT["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    for name in (re.match(r"[\w-]+", requirement).group() for requirement in requirements):
        explained = re.search(rf"^\|.*\b{name}\b", architecture, flags=re.MULTILINE)
        assert explained, f"ARCHITECTURE.md does not explain {name}"
        assert re.search(rf"^{name}==", pins, flags=re.MULTILINE), f"constraints.txt does not pin {name}"


def test_the_changelog_knows_the_version() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
