"""The command line: what it prints and writes, every mistake in one line, and nothing half-written."""

from __future__ import annotations

import errno
import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from workbench import cli, commands, tables
from workbench.analyses import HeadStatistics, load_result
from workbench.analyses.inputs import read_text
from workbench.analyses.labels import HEAD_SCORES, INDUCTION_SCORES, SINK_SCORES
from workbench.analyses.prompts import Spacing

Refused = Callable[..., str]
PROMPT = "a b c d a b c d e f g a b c d e f g h i j a b c"


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast | None, **changes: int) -> Path:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 23, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
        "head_dim": 8, "max_position_embeddings": 96,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes | changes, num_key_value_heads=3)).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Two layers of three heads with a context of 96 tokens, as a folder. Read-only."""
    return save_model(tmp_path_factory.mktemp("models") / "small", tokenizer)


def files(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*")}


# What works


@pytest.mark.parametrize(
    ("command", "arguments", "figures", "tables"),
    [
        ("heads", ["--prompt", PROMPT], ("map", "scatter", "received"), ()),
        ("heads", ["--random", "--length", "8", "--sequences", "3"], ("map", "scatter", "received"), ()),
        ("induction", ["--length", "8", "--sequences", "3"], ("map", "loss", "ablation"), ("_loss",)),
        ("sinks", ["--prompt", PROMPT], ("map", "positions", "kinds", "keys", "norms"), ("_positions", "_kinds")),
        (
            "sinks",
            ["--random", "--length", "10", "--sequences", "3"],
            ("map", "positions", "kinds", "keys", "norms"),
            ("_positions", "_kinds"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:12],
)
def test_an_analysis_prints_its_result_and_writes_it(
    command: str, arguments: list[str], figures: tuple, tables: tuple, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "new" / "results"
    assert cli.main([command, str(folder), *arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "L1H2" in printed.out and "Head" in printed.out and "small" in printed.out
    assert printed.err == f"Written to {out}\n"
    assert files(tmp_path / "new") == {"results"} | {
        f"results/{name}"
        for name in (
            f"{command}.json",
            f"{command}.npz",
            *(f"{command}{name}.csv" for name in ("", *tables)),
            *(f"{command}_{kind}.html" for kind in (*figures, "report")),
        )
    }
    result = load_result(out / command)
    assert result.provenance.model_name == "small"
    frame = pd.read_csv(out / f"{command}.csv")
    pd.testing.assert_frame_equal(frame, result.to_frame(), check_dtype=False)
    assert len(frame) == 2 * 3
    page = (out / f"{command}_{figures[0]}.html").read_text(encoding="utf-8")
    assert "of every head" in page or ", every head" in page
    assert len(page) > 1_000_000 and not re.search(r"<(script|link)[^>]+(src|href)=", page)


def test_the_report_says_how_to_make_it_again(folder: Path, tmp_path: Path) -> None:
    command = ["sinks", str(folder), "--prompt", f"{PROMPT} '<b>'", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    page = (tmp_path / "sinks_report.html").read_text(encoding="utf-8")
    assert html.escape(shlex.join(["workbench", *command])) in page
    result = load_result(tmp_path / "sinks")
    assert all(html.escape(line) in page for line in result.summary().splitlines())
    assert all(html.escape(quantity.definition) in page for quantity in result.quantities.values())


@pytest.mark.usefixtures("browser")
def test_pictures_come_with_the_pages(folder: Path, tmp_path: Path) -> None:
    assert cli.main(["heads", str(folder), "--prompt", PROMPT, "--out", str(tmp_path), "--format", "SVG,png"]) == 0
    pictures = {name for name in files(tmp_path) if name.endswith((".svg", ".png", ".pdf"))}
    assert pictures == {f"heads_{kind}.{name}" for kind in ("map", "scatter", "received") for name in ("svg", "png")}


def test_the_table_is_sorted_by_the_score_that_is_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            ["heads", str(folder), "--prompt", PROMPT, "--sort", "mean_distance", "--top", "4", "--out", str(tmp_path)]
        )
        == 0
    )
    printed = capsys.readouterr().out
    rows = re.findall(r"^ *(L\dH\d) +(\d+\.\d+)", printed, re.MULTILINE)
    frame = pd.read_csv(tmp_path / "heads.csv")
    assert printed.endswith(f"4 of {len(frame)} heads; --top {len(frame)} prints all.\n")
    frame = frame.nlargest(4, "mean_distance")
    assert rows == [(f"L{r.layer:.0f}H{r.head:.0f}", f"{r.mean_distance:.3f}") for r in frame.itertuples()]


def test_a_score_without_values_is_not_sorted_by(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["heads", str(folder), "--prompt", "a b c d"]) == 0  # no token comes twice
    assert re.search(r"^ *Head +Previous token", capsys.readouterr().out, re.MULTILINE)
    command = ["heads", str(folder), "--prompt", "a b c d", "--sort", "duplicate_token", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 1
    printed = capsys.readouterr()
    assert "no head of this model has a value of duplicate_token" in printed.err and "mean_distance" in printed.err
    assert "prefix_matching" not in printed.err and printed.out == "" and not files(tmp_path)


def test_a_table_that_is_not_for_a_terminal_has_one_line_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in continuous integration, whose logs are no terminals
    long = "word " * 60 + "end"
    tables.print_table(("Head", "What it is"), [("L0H0", long), ("L0H1", "short")])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "L0H" in line]
    assert [[cell.strip() for cell in line] for line in lines] == [["L0H0", long], ["L0H1", "short"]]


def test_induction_takes_every_option_of_the_analysis(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says which heads with the pattern it has not ablated."""
    assert get_args(Spacing) == cli.SPACINGS
    drawn = ["--length", "6", "--sequences", "2", "--copies", "3", "--spacing", "random gaps", "--seed", "5"]
    command = ["induction", str(folder), *drawn, "--threshold", "1e-6", "--out", str(tmp_path)]
    chosen = {"length": 6, "n_sequences": 2, "n_copies": 3, "spacing": "random gaps", "seed": 5}
    for n_ablated, said in ((4, "2 more heads reach 1e-06 but were not ablated: --ablate 6\n"), (6, None), (0, None)):
        assert cli.main([*command, "--ablate", str(n_ablated)]) == 0
        printed = capsys.readouterr().out
        assert printed.endswith(said) if said else "not ablated" not in printed
        settings = load_result(tmp_path / "induction").settings
        assert chosen | {"n_ablated": n_ablated, "pattern_threshold": 1e-6} == {
            name: settings[name] for name in (*chosen, "n_ablated", "pattern_threshold")
        }


def test_other_analyses_draw_the_same_random_tokens(folder: Path, tmp_path: Path) -> None:
    drawn = ["--random", "--length", "6", "--sequences", "2", "--copies", "3", "--spacing", "random gaps"]
    for command in ("heads", "sinks"):
        assert cli.main([command, str(folder), *drawn, "--out", str(tmp_path)]) == 0
        provenance = load_result(tmp_path / command).provenance
        assert "6 random tokens 3 times with random gaps, seed 0" in provenance.sentence()


def test_the_scores_to_sort_by_are_those_of_the_results(folder: Path, tmp_path: Path) -> None:
    for command, scores, arguments in (
        ("heads", HEAD_SCORES, ["--random", "--length", "8", "--sequences", "2"]),
        ("induction", INDUCTION_SCORES, ["--length", "8", "--sequences", "2"]),
        ("sinks", SINK_SCORES, ["--random", "--length", "10", "--sequences", "2"]),
    ):
        assert cli.main([command, str(folder), *arguments, "--out", str(tmp_path)]) == 0
        assert set(scores) - {"virtual_sink_mass"} <= set(pd.read_csv(tmp_path / f"{command}.csv"))


def test_max_tokens_keeps_the_beginning_of_a_text_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g " * 40, encoding="utf-8")
    assert (
        cli.main(["heads", str(folder), "--text", str(text), "--max-tokens", "50", "--out", str(tmp_path / "cut")]) == 0
    )
    assert cli.main(["heads", str(folder), "--prompt", "a b c d e f g " * 7, "--out", str(tmp_path / "short")]) == 0
    cut, short = load_result(tmp_path / "cut" / "heads"), load_result(tmp_path / "short" / "heads")
    assert "; the first 50 of 281 tokens of “a b c d e" in capsys.readouterr().out
    assert isinstance(cut, HeadStatistics) and cut.provenance.inputs_sha256 == short.provenance.inputs_sha256


def test_the_mark_that_editors_put_first_is_no_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_text("a b c", encoding="utf-8-sig")
    assert read_text(tmp_path / "marked.txt") == "a b c"


def test_a_long_text_becomes_sequences_for_sinks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g " * 40, encoding="utf-8")  # 280 tokens, far beyond the context
    assert cli.main(["sinks", str(folder), "--text", str(text), "--out", str(tmp_path)]) == 0
    assert "in sequences of BOS and 63 tokens, 252 of the text's 280;" in capsys.readouterr().out
    assert load_result(tmp_path / "sinks").provenance.n_sequences == 280 // 63
    assert cli.main(["sinks", str(folder), "--text", str(text), "--max-tokens", "128", "--out", str(tmp_path)]) == 0
    assert load_result(tmp_path / "sinks").provenance.n_tokens == 128


def test_results_replace_their_namesakes_and_nothing_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heads.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["heads", str(folder), "--prompt", PROMPT, "--out", str(tmp_path)]) == 0
    assert len(pd.read_csv(tmp_path / "heads.csv")) == 6
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert capsys.readouterr().err == f"Written to {tmp_path}; replaced heads.csv\n"
    assert not [name for name in files(tmp_path) if name.startswith(".")]


def test_models_and_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *demo +ready .*MIT", printed, re.MULTILINE) and "smollm2-135m" in printed
    assert cli.main(["fetch", "demo"]) == 0
    assert "demo is in " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert re.fullmatch(r"workbench \d+\.\d+\.\d+\n", capsys.readouterr().out)


# What is refused: one line, exit code 1, nothing written


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused and returns what it says."""

    def run(*arguments: str | Path, out: bool = True) -> str:
        capsys.readouterr()
        target = tmp_path / "never" / "written"
        extra = ["--out", str(target)] if out else []
        assert cli.main([*map(str, arguments), *extra]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("workbench: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
        assert not target.parent.exists()
        assert not [name for name in files(tmp_path) if name.split("/")[-1].startswith(".workbench-")]
        return printed.err

    return run


def test_pictures_without_a_browser_are_refused_before_anything_is_computed(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.loading.pretrained.load_pretrained", lambda *_, **__: pytest.fail("it has begun"))
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    assert "CHROMIUM is /nowhere/chromium" in refused("heads", "demo", "--prompt", "a", "--format", "pdf")
    assert "--format needs --out" in refused("heads", "demo", "--prompt", "a", "--format", "pdf", out=False)


def test_an_unknown_model_is_met_with_near_names(refused: Refused) -> None:
    assert "did you mean demo?" in refused("heads", "dem0", "--prompt", "a")
    assert "did you mean smollm2-135m?" in refused("induction", "smollm2-135")
    assert "did you mean smollm2-135m?" in refused("fetch", "smolm2-135m", out=False)
    assert "did you mean demo?" in refused("app", "--no-browser", "--model", "dem0", out=False)
    assert "is neither a known model nor" in refused("app", "--no-browser", "--model", "nope", out=False)
    assert "no model is named; known names are demo" in refused("app", "--no-browser", "--model", "", out=False)
    assert "no model is named; known names are demo" in refused("heads", "", "--prompt", "a")
    said = refused("fetch", "gpt2", out=False)
    assert "known names are demo, smollm2-135m (one from Hugging Face is downloaded when it is first used)" in said
    assert "there is no folder or file ./nowhere" in refused("sinks", "./nowhere", "--prompt", "a")


def test_folders_that_hold_no_model(refused: Refused, tmp_path: Path, folder: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refused("heads", empty, "--prompt", "a")
    (empty / "config.json").write_text((folder / "config.json").read_text())
    assert "has no weights" in refused("heads", empty, "--prompt", "a")


def test_truncated_weights(refused: Refused, tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    content = (folder / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert "truncated" in refused("heads", broken, "--prompt", "a")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "model.gguf" in refused("heads", tmp_path / "model.gguf", "--prompt", "a")


def test_architectures_and_attributes_that_would_give_wrong_numbers(
    refused: Refused, tmp_path: Path, folder: Path
) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (odd / "config.json").write_text(
        json.dumps(config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    assert "amba" in refused("heads", odd, "--prompt", "a")
    (odd / "config.json").write_text(json.dumps(config | {"new_kind_of_attention": True}))
    assert "new_kind_of_attention" in refused("heads", odd, "--prompt", "a")


def test_texts_that_cannot_be_analysed(refused: Refused, tmp_path: Path, folder: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("Größe".encode("latin1"))
    assert "not UTF-8" in refused("heads", folder, "--text", text)
    assert "No such file" in refused("heads", folder, "--text", tmp_path / "absent.txt")
    assert "Is a directory" in refused("sinks", folder, "--text", tmp_path)
    text.write_text("a " * 200)
    assert "201 tokens" in (said := refused("heads", folder, "--text", text)) and "--max-tokens" in said
    for empty in ("", "  \n "):
        assert "is empty" in refused("heads", folder, "--prompt", empty)
        text.write_text(empty)
        assert "is empty" in refused("sinks", folder, "--text", text)
    assert "other queries" in refused("sinks", folder, "--prompt", "a b c")
    text.write_bytes("a b c".encode("utf-16"))
    assert "iconv -f utf-16" in refused("heads", folder, "--text", text)
    for binary in (b"\x89PNG\r\n\x1a\n\x00\x00", b"\x1f\x8b\x08\x00 packed", b"\xff\xd8\xff\xe0\x00\x10JFIF"):
        text.write_bytes(binary)
        assert "does not look like text" in (said := refused("heads", folder, "--text", text)) and "iconv" not in said
    assert "not valid Unicode" in refused("heads", folder, "--prompt", "a \udcff b")


def test_options_that_do_not_fit_the_model(
    refused: Refused, tmp_path: Path, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert "choose a smaller length" in refused("induction", folder, "--length", "90")
    for seed in ("-1", str(2**64)):
        assert "seed must be a whole number" in refused("induction", folder, "--length", "8", "--seed", seed)
    for command in ("heads", "sinks"):
        said = refused(command, folder, "--prompt", "a", "--length", "8", "--seed", "0")
        assert "--length and --seed need --random" in said
    (tmp_path / "text.txt").write_text("a b c")
    said = refused("heads", folder, "--text", tmp_path / "text.txt", "--sequences", "8")
    assert "--sequences needs --random in place of a text; leave it out" in said
    for option, value in (("--copies", "3"), ("--spacing", "fixed")):
        assert f"{option} needs --random" in refused("sinks", folder, "--prompt", "a", option, value)
    assert "between 0 and 6, the number of heads" in refused("induction", folder, "--length", "8", "--ablate", "7")
    assert "--length and --sequences" in refused("heads", folder, "--random", "--max-tokens", "5")
    assert "--device meta cannot be used" in refused("heads", folder, "--prompt", "a", "--device", "meta")
    assert "--device nonsense cannot be used" in refused("heads", folder, "--prompt", "a", "--device", "nonsense")
    silent = save_model(tmp_path / "silent", None)
    assert "has no tokenizer" in refused("heads", silent, "--prompt", "a")
    small = save_model(tmp_path / "small-vocabulary", tokenizer, vocab_size=7)
    assert "vocabulary has 7" in refused("heads", small, "--prompt", "a b c d e f g h")


def test_an_unwritable_folder_is_refused_before_anything_is_computed(
    refused: Refused,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workbench.loading.pretrained.load_pretrained", lambda *a, **k: pytest.fail("too early"))
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    reasons = {
        "file": "file is a file", "file/below/it": "file is a file", "dangling": "dangling is a link",
        "dangling/below": "dangling is a link", "loop": "loop is a link", "new/" + 300 * "n": "too long",
        "/proc/results": "folder",
    }  # fmt: skip
    before = files(tmp_path)
    for target, reason in reasons.items():
        said = refused("heads", folder, "--prompt", "a", "--out", tmp_path / target, out=False)
        assert f"cannot write into {tmp_path / target}" in said and reason in said
        assert files(tmp_path) == before


def test_a_folder_in_the_place_of_a_file_moves_nothing(refused: Refused, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "results" / "heads_map.html").mkdir(parents=True)
    (tmp_path / "results" / "heads.csv").write_text("old")
    said = refused("heads", folder, "--prompt", PROMPT, "--out", tmp_path / "results", out=False)
    assert f"{tmp_path / 'results' / 'heads_map.html'} is a folder" in said
    assert files(tmp_path / "results") == {"heads_map.html", "heads.csv"}
    assert (tmp_path / "results" / "heads.csv").read_text() == "old"


def test_a_missing_extra_says_how_to_install_it(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert "pip install 'attention-workbench[app]'" in refused("app", out=False)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "/out: No space left on device; name another folder"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "not enough memory"),
    ],
    ids=["interrupted", "disk full", "out of memory"],
)
def test_what_fails_on_the_way_leaves_nothing_behind(
    raised: BaseException, code: int, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*arguments: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("workbench.analyses.figures.write_figure", fail)  # after the result and the table are written
    assert cli.main(["heads", str(folder), "--prompt", PROMPT, "--out", str(tmp_path / "out")]) == code
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert files(tmp_path) == set()


def test_a_bug_is_no_user_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("workbench.loading.pretrained.load_pretrained", fail)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        cli.main(["heads", str(folder), "--prompt", PROMPT])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["heads"],
        ["heads", "demo"],
        ["heads", "demo", "--prompt", "a", "--random"],
        ["heads", "demo", "--prompt", "a", "--max-tokens", "0"],
        ["heads", "demo", "--prompt", "a", "--max-tokens", "ten"],
        ["heads", "demo", "--prompt", "a", "--sort", "nonsense"],
        ["induction", "demo", "--sequences", "-1"],
        ["induction", "demo", "--ablate", "-1"],
        ["induction", "demo", "--copies", "1"],
        ["induction", "demo", "--spacing", "wide"],
        ["induction", "demo", "--threshold", "0"],
        ["induction", "demo", "--threshold", "nan"],
        ["heads", "demo", "--random", "--ablate", "3"],
        ["heads", "demo", "--prompt", "a", "--out", ""],
        ["heads", "demo", "--text", ""],
        ["heads", "demo", "--prompt", "a", "--format", "svg,gif"],
        ["lens", "demo"],
        ["lens", "demo", "--random"],
        ["attribute", "demo"],
        ["attribute", "demo", "--task", "nonsense"],
        ["attribute", "demo", "--task", "facts", "--prompts", "file"],
        ["attribute", "demo", "--prompts", ""],
        ["prune", "demo", "--task", "facts", "--n-prompts", "0"],
        ["prune", "demo", "--task", "facts", "--tokens"],
        ["app", "--port", "99999"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("usage: workbench") and "Traceback" not in printed.err
