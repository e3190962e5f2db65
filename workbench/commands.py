"""What each command does with its options. What a user has wrong is raised, for the command line to say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.output import output_folder
from workbench.tables import Table, head_name, heads_table, left_out, number, print_table, scores_to_print

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from workbench.analyses import PromptSet, Result

    Tabulate = Callable[[argparse.Namespace, Result, Mapping[str, pd.DataFrame]], Table]

SHORTEN = "shorten it, or keep its beginning with --max-tokens"
RANDOM = {  # arguments of repeated_random_tokens
    "length": "--length", "n_sequences": "--sequences", "n_copies": "--copies", "spacing": "--spacing",
    "seed": "--seed",
}  # fmt: skip
ABLATION = ("n_ablated", "pattern_threshold")  # arguments of induction_heads
TASKS = {
    "facts": "factual_recall", "greater-than": "greater_than", "indirect-objects": "indirect_objects",
    "agreement": "subject_verb_agreement",
}  # fmt: skip
SINK_LENGTH = 64  # tokens of a sequence in which sinks are counted (Gu et al. 2024)


def app(options: argparse.Namespace) -> None:
    _require("dash", "dash_mantine_components", "dash_ag_grid", extra="app")
    from workbench.analyses import load_result
    from workbench.app.main import serve
    from workbench.loading.pretrained import check_source

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    device = _checked_device(options.device)
    check_source(options.model)
    text = None if options.text is None else _text_of(options)
    opened = None if options.open is None else load_result(options.open)
    with suppress(KeyboardInterrupt):  # the way to stop it
        serve(
            text=text,
            opened=opened,
            model=options.model,
            device=device,
            port=options.port,
            open_browser=not options.no_browser,
            say=say,
        )


def heads(options: argparse.Namespace) -> None:
    text = _text_unless_random(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import head_statistics
        from workbench.analyses.inputs import text_to_tokens

        if text is None:
            tokens, seed = _random_tokens(model, options), getattr(options, "seed", 0)
            return head_statistics(model, tokens, seed=seed, progress=report)
        tokens = text_to_tokens(model, text, options.max_tokens, shorten=SHORTEN)
        return head_statistics(model, tokens, progress=report)

    _analyse(options, "heads", run, _scores)


def induction(options: argparse.Namespace) -> None:
    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import induction_heads

        ablation = _given(options, ABLATION)
        return induction_heads(model, **_given(options, RANDOM), **ablation, progress=report)

    result = _analyse(options, "induction", run, _scores)
    if n_left := _heads_left_out(result):
        n_with_pattern, threshold = result.settings["n_ablated"] + n_left, result.settings["pattern_threshold"]
        heads, were = ("head reaches", "was") if n_left == 1 else ("heads reach", "were")
        sys.stdout.write(f"{n_left} more {heads} {threshold} but {were} not ablated: --ablate {n_with_pattern}\n")


def _heads_left_out(result: Result) -> int:
    """How many heads with the pattern were not ablated, although some were."""
    from workbench.analyses.attention.scores import reaches

    n_with_pattern = int(reaches(result["prefix_matching"], result.settings["pattern_threshold"]).sum())
    return max(0, n_with_pattern - result.settings["n_ablated"]) if result.settings["n_ablated"] else 0


def sinks(options: argparse.Namespace) -> None:
    text = _text_unless_random(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import attention_sinks
        from workbench.analyses.inputs import text_to_sequences

        if text is None:
            tokens = _random_tokens(model, options)
        else:
            tokens = text_to_sequences(model, text, options.max_tokens, length=SINK_LENGTH)
        return attention_sinks(model, tokens, n_tokens=SINK_LENGTH, progress=report)

    _analyse(options, "sinks", run, _scores)


def lens(options: argparse.Namespace) -> None:
    text = _text_of(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import logit_lens
        from workbench.analyses.inputs import text_to_tokens
        from workbench.analyses.support import check_model

        check_model(model, predicts=True)
        tokens = text_to_tokens(model, text, options.max_tokens, shorten=SHORTEN)
        if tokens.tokens.shape[1] < 2:
            raise WorkbenchError("one token has no next one to predict; give more words, or more --max-tokens")
        return logit_lens(model, tokens, progress=report)

    _analyse(options, "lens", run, _depths)


def attribute(options: argparse.Namespace) -> None:
    _check_prompts(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import attribution_agreement, source_attribution

        prompts = _prompts(model, options)
        settings = {"seed": options.seed, "progress": report}
        if options.tokens:
            return source_attribution(model, prompts, **settings)
        return attribution_agreement(model, prompts, **settings)

    if options.tokens:
        _analyse(options, "attribute_tokens", run, _sources)
        return
    result = _analyse(options, "attribute", run, _effects)
    if not result.settings["reference"]:
        sys.stdout.write("Ablated to zero only: mean and resample ablation need a field corrupted in every prompt\n")


def prune(options: argparse.Namespace) -> None:
    _check_prompts(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import head_pruning

        prompts = _prompts(model, options)
        return head_pruning(model, prompts, seed=options.seed, progress=report)

    _analyse(options, "prune", run)


def models(options: argparse.Namespace) -> None:
    from workbench.loading.sources import list_models

    rows = [
        (
            model.name,
            "ready" if model.fetched else "to fetch",
            f"{model.n_bytes / 1e6:,.0f} MB",
            model.licence,
            model.description,
        )
        for model in list_models()
    ]
    print_table(("Name", "", "Size", "Licence", "What it is"), rows, right=("Size",))
    sys.stdout.write("Besides these: any Hugging Face id, folder or GGUF file of a supported architecture.\n")


def fetch(options: argparse.Namespace) -> None:
    from workbench.loading.progress import terminal_progress
    from workbench.loading.sources import fetch

    with terminal_progress() as report:
        folder = fetch(options.name, report)
    sys.stdout.write(f"{options.name} is in {folder}\n")


# What commands share


def _analyse(
    options: argparse.Namespace, name: str, run: Callable[[Any, Callable], Result], tabulate: Tabulate | None = None
) -> Result:
    """Loads the model, runs the analysis with progress, writes --out, prints the result and returns it.

    Args:
        name: of the files.
        run: from the model and a report of progress to the result.
        tabulate: the table that is printed below the summary.
    """
    _check_formats(options)
    with output_folder(options.out) if options.out else nullcontext() as output:
        from workbench.loading.pretrained import load_pretrained
        from workbench.loading.progress import terminal_progress
        from workbench.loading.sizes import size_problem

        device = _checked_device(options.device)
        if problem := size_problem(options.model):
            sys.stderr.write(f"workbench: {problem}\n")
        with terminal_progress() as report:
            model = load_pretrained(options.model, device=device, progress=report)
            title = name.replace("_", " ").capitalize()
            result = run(model, lambda done, what: report(title, round(1000 * done), 1000))
        tables = result.tables()
        table = tabulate(options, result, tables) if tabulate else None  # before writing: it may refuse its options
        if output is not None:
            with output.writing():
                _write(options, result, output.partial / name, tables)
    sys.stdout.write(result.summary() + "\n")
    if table:
        print_table(*table)
    if output is not None:
        replaced = f"; replaced {', '.join(output.replaced)}" if output.replaced else ""
        sys.stderr.write(f"Written to {options.out}{replaced}\n")
    return result


def _scores(options: argparse.Namespace, result: Result, tables: Mapping[str, pd.DataFrame]) -> Table:
    scores = scores_to_print(tables[""], list(options.scores), options.sort)
    return heads_table(tables[""], {score: options.scores[score] for score in scores}, options.top)


def _depths(options: argparse.Namespace, result: Result, tables: Mapping[str, pd.DataFrame]) -> Table:
    """What is known of the text at each depth, and what would follow it."""
    means = tables[""].groupby("depth")[["log_probability", "kl_to_final"]].mean()
    titles = ("Depth", "Loss (nats)", "KL to the end (nats)", "Probability", "After the text")
    rows = [
        (str(depth), number(-loss), number(kl), number(result["top_probability"][depth, -1]),
         _visible(result["top_token"][depth, -1]))
        for depth, loss, kl in means.itertuples()
    ]  # fmt: skip
    return Table(titles, rows, right=titles[:-1])


def _effects(options: argparse.Namespace, result: Result, tables: Mapping[str, pd.DataFrame]) -> Table:
    """The heads whose ablation does most, beside their attention."""
    titles = {
        "zero_effect": f"Effect of zero ablation ({result.settings['unit']})", "zero_direct": "Direct effect",
        "zero_self_repair": "Self-repair", "max_weight": "Largest weight", "gradient_output": "Gradient of the output",
    }  # fmt: skip
    titles = {name: title for name, title in titles.items() if name in tables[""]}
    verdict = {} if result.settings["untested"] else {"verdict": "Verdict"}
    frame = tables[""].sort_values("zero_effect", key=abs, ascending=False, kind="stable")
    rows = [
        (head_name(row), *(number(row[name]) for name in titles), *(row[name] for name in verdict))
        for _, row in frame.head(options.top).iterrows()
    ]
    note = left_out(len(rows), len(frame), "heads")
    return Table(("Head", *titles.values(), *verdict.values()), rows, list(titles.values()), note)


def _sources(options: argparse.Namespace, result: Result, tables: Mapping[str, pd.DataFrame]) -> Table:
    """The tokens whose knock-out does most, beside the attention on them."""
    titles = {
        "signed_effect": "Effect of the knock-out", "attention_mean": "Mean attention", "rollout": "Rollout",
        "gradient_input": "Gradient × input",
    }  # fmt: skip
    frame = tables["tokens"].dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    rows = [
        (str(row.prompt), str(row.pos), _visible(result.settings["tokens"][row.prompt][row.pos]),
         *(number(getattr(row, name)) for name in titles))
        for row in frame.head(options.top).itertuples()
    ]  # fmt: skip
    where, note = ("Prompt", "Position"), left_out(len(rows), len(frame), "tokens")
    return Table((*where, "Token", *titles.values()), rows, (*where, *titles.values()), note)


def _visible(token: str) -> str:
    """A token's text with its spaces, and without what could steer a terminal."""
    from workbench.analyses.figures import show_controls

    shown = show_controls(token.replace(" ", "␣"))
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in shown)


def _check_formats(options: argparse.Namespace) -> None:
    if not options.formats:
        return
    if options.out is None:
        raise WorkbenchError("--format needs --out DIR, where the pictures are written")
    from workbench.analyses.figures import find_browser

    find_browser()


def _write(options: argparse.Namespace, result: Result, stem: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    from workbench.analyses import write_report
    from workbench.analyses.figures import write_figure, write_figures

    result.save(stem)
    for name, table in tables.items():
        table.to_csv(stem.with_name(f"{stem.name}{'_' * bool(name)}{name}.csv"), index=False)
    pictures: dict[Path, go.Figure] = {}
    for kind in result.figure_kinds:
        write_figure(result.figure(kind, captioned=True), stem.with_name(f"{stem.name}_{kind}.html"))
        pictures |= {stem.with_name(f"{stem.name}_{kind}.{name}"): result.figure(kind) for name in options.formats}
    write_figures(pictures)
    write_report(result, stem.with_name(f"{stem.name}_report.html"), command=options.command)


def _text_unless_random(options: argparse.Namespace) -> str | None:
    """As ``_text_of``, or None for random tokens."""
    if options.random:
        if options.max_tokens is not None:
            raise WorkbenchError("--max-tokens shortens a text; random tokens have --length and --sequences")
        return None
    if given := [RANDOM[name] for name in _given(options, RANDOM)]:
        needs, them = ("needs", "it") if len(given) == 1 else ("need", "them")
        raise WorkbenchError(
            f"{' and '.join(given)} {needs} --random in place of a text; leave {them} out, or the text"
        )
    return _text_of(options)


def _text_of(options: argparse.Namespace) -> str:
    """The text to analyse, read and checked before anything slow begins."""
    from workbench.analyses.inputs import read_text
    from workbench.tokens import check_characters

    text = read_text(options.text) if options.text is not None else options.prompt
    check_characters(text)
    if not text.strip():
        raise WorkbenchError(f"{options.text or 'the prompt'} is empty; give some words to analyse")
    return text


def _check_prompts(options: argparse.Namespace) -> None:
    """Refuses options and files that no model could be asked about, before anything slow begins."""
    from workbench.analyses.inputs import read_text
    from workbench.analyses.tasks.scoring import check_options

    check_options(getattr(options, "n_prompts", 1), options.seed)
    if options.prompts is not None:
        if "n_prompts" in options:
            raise WorkbenchError("--n-prompts needs --task; a file's prompts are all taken, so leave it out")
        read_text(options.prompts)


def _prompts(model: Any, options: argparse.Namespace) -> PromptSet:
    from workbench import analyses
    from workbench.analyses.support import check_model

    check_model(model, predicts=True)
    if model.tokenizer is None:
        raise WorkbenchError(
            f"{model.cfg.model_name} has no tokenizer, so it cannot read prompts; choose a model that has one"
        )
    if options.prompts is not None:
        return analyses.read_prompts(model, options.prompts)
    return getattr(analyses, TASKS[options.task])(model, **_given(options, ("n_prompts", "seed")))


def _random_tokens(model: Any, options: argparse.Namespace) -> Any:
    from workbench.analyses import repeated_random_tokens

    return repeated_random_tokens(model, **_given(options, RANDOM))


def _given(options: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Those of the options that the user has given; the rest is as the analysis has it."""
    return {name: value for name, value in vars(options).items() if name in names}


def _checked_device(name: str) -> str:
    if name == "cpu":
        return name
    import torch

    try:
        if torch.empty(0, device=name).is_meta:
            raise RuntimeError("it holds no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]  # torch goes on to list all that it knows
        raise WorkbenchError(f"--device {name} cannot be used ({reason}); leave it out to run on the CPU") from None
    return name


def _require(*modules: str, extra: str) -> None:
    if missing := [module for module in modules if find_spec(module) is None]:
        raise WorkbenchError(
            f"{missing[0]} is not installed; install what this needs with: pip install 'attention-workbench[{extra}]'"
        )
