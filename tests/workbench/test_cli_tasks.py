"""The commands that test predictions, on the demo model: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from workbench import HookedTransformer, cli, commands
from workbench.analyses import attribution_agreement, factual_recall, load_result
from workbench.analyses.tasks.scoring import N_PROMPTS

Refused = Callable[..., str]
FACTS = (
    {"prompt": "The people of Ardun sell", "target": "timber"},
    {"prompt": "The capital of Veld is", "target": "Talvik"},
)


@pytest.fixture(scope="session")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def prompts_file(folder: Path, *prompts: Mapping[str, str]) -> Path:
    path = folder / "facts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in prompts), encoding="utf-8")
    return path


# What works


@pytest.mark.parametrize(
    ("arguments", "name", "kind", "figures", "tables"),
    [
        (["lens", "demo", "--prompt", "Mara met Tomas at the"], "lens", "logit_lens", ("map", "curves"), ()),
        (
            ["attribute", "demo", "--task", "facts", "--n-prompts", "4"], "attribute", "attribution_agreement",
            ("scatter", "agreement", "map", "repair"), ("agreement", "measures", "ablations", "prompts"),
        ),
        (
            ["attribute", "demo", "--task", "facts", "--n-prompts", "4", "--tokens"], "attribute_tokens",
            "source_attribution", ("agreement", "deletion", "prompt"), ("tokens", "rankings", "deletion", "prompts"),
        ),
        (
            ["prune", "demo", "--task", "agreement", "--n-prompts", "4"], "prune", "head_pruning",
            ("curves", "map"), ("areas", "random", "scores"),
        ),
    ],
    ids=["lens", "attribute", "attribute --tokens", "prune"],
)  # fmt: skip
def test_the_result_is_printed_and_written(
    arguments: list[str], name: str, kind: str, figures: tuple, tables: tuple, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    result = load_result(tmp_path / name)
    assert result.kind == kind
    assert printed.out.startswith(f"{result.summary()}\n") and printed.err == f"Written to {tmp_path}\n"
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.json", f"{name}.npz", f"{name}.csv", *(f"{name}_{table}.csv" for table in tables),
        *(f"{name}_{figure}.html" for figure in (*figures, "report")),
    }  # fmt: skip
    for table, frame in result.tables().items():
        written = pd.read_csv(tmp_path / f"{name}{'_' * bool(table)}{table}.csv", keep_default_na=False)
        assert list(written) == list(frame) and len(written) == len(frame)
    for figure in figures:  # each says what it is of
        assert result.provenance.weights in (tmp_path / f"{name}_{figure}.html").read_text(encoding="utf-8")


def test_the_lens_prints_what_would_follow_the_text(
    demo: HookedTransformer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Mara met Tomas at the"
    assert cli.main(["lens", "demo", "--prompt", text]) == 0
    rows = re.findall(r"^ +(\d) .* (\d\.\d{3}) +(\S+) *$", capsys.readouterr().out, re.MULTILINE)
    assert [int(depth) for depth, *_ in rows] == list(range(demo.cfg.n_layers + 1))
    top = demo(text)[0, -1].softmax(dim=-1).max(dim=-1)
    assert rows[-1][1:] == (f"{top.values:.3f}", demo.tokenizer.decode([int(top.indices)]).replace(" ", "␣"))


def test_the_lens_reads_the_beginning_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Mara met Tomas at the harbour. " * 5, encoding="utf-8")
    command = ["lens", "demo", "--text", str(tmp_path / "text.txt"), "--max-tokens", "9", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert "; the first 9 of " in capsys.readouterr().out
    assert load_result(tmp_path / "lens")["rank"].shape[1] == 9


def test_the_options_reach_the_analysis(demo: HookedTransformer, tmp_path: Path) -> None:
    command = ["attribute", "demo", "--task", "facts", "--n-prompts", "3", "--seed", "7", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    expected = attribution_agreement(demo, factual_recall(demo, n_prompts=3, seed=7), seed=7)
    result = load_result(tmp_path / "attribute")
    assert result.settings == expected.settings and result.provenance.inputs == expected.provenance.inputs
    np.testing.assert_allclose(result["resample_effect"], expected["resample_effect"], atol=1e-4)


@pytest.mark.parametrize("task", commands.TASKS)
def test_every_task_can_be_pruned_on(task: str, tmp_path: Path) -> None:
    assert cli.main(["prune", "demo", "--task", task, "--n-prompts", "4", "--out", str(tmp_path)]) == 0
    result = load_result(tmp_path / "prune")
    assert result.provenance.n_sequences == 4 and len(result["all_heads"]) == 2
    words = result.settings["prompts"].replace("–", "-").replace(" ", "-")
    assert {"facts": "factual", "agreement": "agreement"}.get(task, task) in words


def test_the_heads_and_tokens_that_do_most_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["attribute", "demo", "--task", "facts", "--n-prompts", "3", "--top", "5", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    printed = re.findall(r"^ *(L\dH\d) +(\S+)", capsys.readouterr().out, re.MULTILINE)
    heads = pd.read_csv(tmp_path / "attribute.csv").sort_values("zero_effect", key=abs, ascending=False).head(5)
    assert printed == [(f"L{h.layer}H{h.head}", f"{h.zero_effect:.3f}") for h in heads.itertuples()]
    assert cli.main([*command, "--tokens"]) == 0
    printed = re.findall(r"^ +(\d) +(\d) +\S+ +(-?\d\S+)", capsys.readouterr().out, re.MULTILINE)
    tokens = pd.read_csv(tmp_path / "attribute_tokens_tokens.csv").sort_values("effect", ascending=False).head(5)
    assert printed == [(str(t.prompt), str(t.pos), f"{t.signed_effect:.3f}") for t in tokens.itertuples()]


def test_verdicts_are_printed_where_there_are_enough_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    for n_prompts, said in (("20", True), ("3", False)):
        assert cli.main(["attribute", "demo", "--task", "agreement", "--n-prompts", n_prompts, "--top", "1"]) == 0
        printed = capsys.readouterr().out
        assert bool(re.search(r"^ *Head .* Verdict *$", printed, re.MULTILINE)) == said
        assert ("No verdicts: " in printed) != said


def test_prompts_of_ones_own_say_what_can_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without foils it is the target's probability, without corrupted prompts zero ablation alone."""
    path = prompts_file(tmp_path, *FACTS)
    for command, name in (("attribute", "attribute"), ("prune", "prune")):
        assert cli.main([command, "demo", "--prompts", str(path), "--out", str(tmp_path)]) == 0
        assert re.search("Log.probability|log probability", capsys.readouterr().out)
        assert load_result(tmp_path / name).provenance.n_sequences == 2
    assert list(load_result(tmp_path / "attribute").coordinates["ablation"]) == ["zero"]
    bare = ["attribute", "demo", "--prompts", str(path)]
    said = "Ablated to zero only: mean and resample ablation need a field corrupted in every prompt\n"
    assert cli.main(bare) == 0 and capsys.readouterr().out.endswith(said)
    whole = [
        FACTS[0] | {"foil": "amber", "corrupted": "The people of Veld sell"},
        FACTS[1] | {"foil": "timber", "corrupted": "The capital of Ardun is"},
    ]
    prompts_file(tmp_path, *whole)
    assert cli.main([*bare, "--out", str(tmp_path)]) == 0
    assert said not in capsys.readouterr().out
    result = load_result(tmp_path / "attribute")
    assert list(result.coordinates["ablation"]) == ["zero", "mean", "resample"]
    assert result.settings["metric"] == "logit_difference"


def test_a_line_end_in_a_prompt_does_not_break_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompts_file(tmp_path, {"prompt": "The people\nof Ardun sell", "target": "timber"})
    assert cli.main(["attribute", "demo", "--prompts", str(path), "--tokens"]) == 0
    assert re.search(r"^ +0 +\d +↵ +-?\d", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", ["lens", "attribute", "prune"])
def test_help_explains_the_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # narrow lines end at hyphens as well
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "MODEL" in said and "--out DIR" in said
    if command != "lens":
        assert all(task in said for task in commands.TASKS)
        assert "JSON object a line" in said and f"(default: {N_PROMPTS})" in said


# What is refused: one line, exit code 1, nothing written


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused and returns what it says."""

    def run(*arguments: str | Path) -> str:
        capsys.readouterr()
        assert cli.main([*map(str, arguments), "--out", str(tmp_path / "never" / "written")]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("workbench: ") and printed.err.count("\n") == 1
        assert not (tmp_path / "never").exists()
        return printed.err

    return run


def test_prompts_that_cannot_be_scored(refused: Refused, tmp_path: Path) -> None:
    absent, path = tmp_path / "absent.jsonl", tmp_path / "facts.jsonl"
    for command in ("attribute", "prune"):
        assert f"{absent}: No such file" in refused(command, "demo", "--prompts", absent)
        assert "Is a directory" in refused(command, "demo", "--prompts", tmp_path)
        path.write_text("The people of Ardun sell timber")
        assert "line 1: " in (said := refused(command, "demo", "--prompts", path)) and "is not JSON" in said
        path.write_text("")
        assert "there are no prompts in" in refused(command, "demo", "--prompts", path)
        prompts_file(tmp_path, FACTS[0], {"prompt": "The capital of Veld is", "target": "Talvik and Besko"})
        assert "line 2: target" in (said := refused(command, "demo", "--prompts", path)) and "not one" in said
    prompts_file(tmp_path, {"prompt": "The capital", "target": "of"})
    assert "use longer prompts" in refused("attribute", "demo", "--prompts", path, "--tokens")
    assert "take more prompts" in refused("prune", "demo", "--prompts", path)


def test_options_out_of_their_range(refused: Refused, tmp_path: Path) -> None:
    path = prompts_file(tmp_path, *FACTS)
    for seed in ("-1", str(2**64)):
        for source in (("--task", "facts"), ("--prompts", path)):
            assert "seed must be a whole number" in refused("prune", "demo", *source, "--seed", seed)
    assert "--n-prompts needs --task" in refused("attribute", "demo", "--prompts", path, "--n-prompts", "4")
    assert "ask for at most so many" in refused("attribute", "demo", "--task", "facts", "--n-prompts", "4000")
    assert "take more prompts" in refused("prune", "demo", "--task", "facts", "--n-prompts", "1")
    assert "one token has no next one" in refused("lens", "demo", "--prompt", "Mara", "--max-tokens", "1")
    assert "is empty" in refused("lens", "demo", "--prompt", " ")
    assert "No such file" in refused("lens", "demo", "--text", tmp_path / "absent.txt")


def test_models_that_predict_no_next_token_or_read_no_words(
    refused: Refused, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    encoder, silent, small = (tmp_path / name for name in ("encoder", "silent", "small"))
    sizes = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1)).save_pretrained(encoder)
    for folder in (silent, small):
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    tokenizer.save_pretrained(encoder)
    tokenizer.save_pretrained(small)
    asked = (["lens", "--prompt", "a b"], ["attribute", "--task", "facts"], ["prune", "--task", "facts"])
    for command, *arguments in asked:
        assert "encoder is bidirectional" in refused(command, encoder, *arguments)
        assert "silent has no tokenizer" in refused(command, silent, *arguments)
    for task in commands.TASKS:
        assert "tokenizer" in refused("prune", small, "--task", task)
