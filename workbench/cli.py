"""The command ``workbench``. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 something is wrong with the input (one line says what, and what to do), 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.analyses.labels import HEAD_SCORES, INDUCTION_SCORES, SINK_SCORES
from workbench.errors import WorkbenchError, ran_out_of_memory
from workbench.output import output_folder
from workbench.tables import print_heads, print_table, scores_to_print

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analyses import Result

SHORTEN = "shorten it, or keep its beginning with --max-tokens"
RANDOM = {  # arguments of repeated_random_tokens
    "length": "--length", "n_sequences": "--sequences", "n_copies": "--copies", "spacing": "--spacing",
    "seed": "--seed",
}  # fmt: skip
SPACINGS = ("fixed", "random gaps")
ABLATION = ("n_ablated", "pattern_threshold")  # arguments of induction_heads
SINK_LENGTH = 64  # tokens of a sequence in which sinks are counted (Gu et al. 2024)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (``sys.argv`` by default) and returns its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    if sys.stderr is None:  # closed, like standard output below
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return _refuse("standard output is closed; leave it open, or send it to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whatever its encoding: a quotation mark must not end a command
            stream.reconfigure(errors="replace")
    try:
        try:
            options = _parser().parse_args(arguments)
            options.run(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _refuse("interrupted", code=130)
    except BrokenPipeError:  # whoever read our output has had enough, as `head` does
        _drop_output()
    except (WorkbenchError, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        _drop_output()
        return _refuse(f"{error.filename or 'a file or the output'} cannot be used: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return _refuse("not enough memory; shorten the input with --max-tokens, or choose a smaller model")
    return 0


def _drop_output() -> None:
    """Keeps Python from trying once more, as it exits, to write what could not be written."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str, *, code: int = 1) -> int:
    sys.stderr.write(f"workbench: {' '.join(message.split())}\n")
    return code


def _terminate(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)  # unlike the default it lets everything clean up


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workbench",
        description="Attention heads of Transformers: what they do, in numbers and figures.",
        epilog="`workbench COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    app = commands.add_parser("app", help="open the dashboard in the browser", description="Opens the dashboard.")
    app.add_argument("--model", default="demo", help="what it opens on (default: the bundled demo model)")
    app.add_argument("--port", type=_port, default=8050, help="where it listens; a taken port gives the next free one")
    _add_device(app)
    app.add_argument("--no-browser", action="store_true", help="do not open a browser, only print the address")
    app.set_defaults(run=_app)

    heads = _analysis(commands, "heads", "every statistic of every head on a text", _heads)
    _add_input(heads)
    _add_random(heads)
    _add_table(heads, HEAD_SCORES)

    induction = _analysis(commands, "induction", "induction heads, and what their ablation costs", _induction)
    _add_random(induction)
    _add_ablation(induction)
    _add_table(induction, INDUCTION_SCORES)

    sinks = _analysis(commands, "sinks", "attention sinks: where, in which heads, what they carry", _sinks)
    _add_input(sinks)
    _add_random(sinks)
    _add_table(sinks, SINK_SCORES)

    models = commands.add_parser("models", help="list the models known by name", description="Lists the known models.")
    models.set_defaults(run=_models)
    fetch = commands.add_parser("fetch", help="download a known model once", description="Downloads a known model.")
    fetch.add_argument("name", metavar="NAME", help="a name that `workbench models` lists")
    fetch.set_defaults(run=_fetch)
    return parser


class _Version(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, help="print the version and exit", **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version  # here, as it takes a tenth of a second

        sys.stdout.write(f"workbench {version('attention-workbench')}\n")
        parser.exit()


def _analysis(commands: Any, name: str, purpose: str, run: Callable) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    parser.add_argument("model", metavar="MODEL", help="a known name, a Hugging Face id, a folder or a GGUF file")
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="also write the result, its figures (HTML) and tables (CSV)"
    )
    _add_device(parser)
    parser.set_defaults(run=run)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where the model runs, for instance cuda (default: cpu)")


def _add_input(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the text itself")
    source.add_argument("--text", type=_path, metavar="FILE", help="a UTF-8 text file")
    source.add_argument("--random", action="store_true", help="random tokens that repeat")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="keep only the first N tokens of the text")


def _add_random(parser: argparse.ArgumentParser) -> None:
    random = parser.add_argument_group("random tokens", argument_default=argparse.SUPPRESS)
    random.add_argument("--length", type=_positive, metavar="N", help="tokens that repeat (default: 64)")
    random.add_argument(
        "--sequences", dest="n_sequences", type=_positive, metavar="N", help="how many sequences (default: 8)"
    )
    random.add_argument(
        "--copies", dest="n_copies", type=_copies, metavar="N", help="how often the tokens occur (default: 2)"
    )
    random.add_argument(
        "--spacing", choices=SPACINGS, metavar="KIND",
        help="of the copies: fixed, or 'random gaps' of other tokens (default: fixed)",
    )  # fmt: skip
    random.add_argument("--seed", type=int, metavar="N", help="of the draw (default: 0)")


def _add_ablation(parser: argparse.ArgumentParser) -> None:
    ablation = parser.add_argument_group("ablation", argument_default=argparse.SUPPRESS)
    ablation.add_argument(
        "--ablate", dest="n_ablated", type=_whole, metavar="N",
        help="how many heads to ablate, those with the highest prefix matching (default: 5); 0 for none",
    )  # fmt: skip
    ablation.add_argument(
        "--threshold", dest="pattern_threshold", type=_share, metavar="SHARE",
        help="the prefix matching from which a head has the pattern (default: 0.3)",
    )  # fmt: skip


def _add_table(parser: argparse.ArgumentParser, scores: Mapping[str, str]) -> None:
    table = parser.add_argument_group("the table on the terminal")
    names = ", ".join(scores)
    table.add_argument(
        "--sort", choices=scores, metavar="SCORE", help=f"one of {names} (default: the first of them that has values)"
    )
    table.add_argument("--top", type=_positive, default=12, metavar="N", help="how many heads to print (default: 12)")
    parser.set_defaults(scores=scores)


def _whole(text: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} up, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, least=1)


def _copies(text: str) -> int:
    return _whole(text, least=2)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 1, got {text!r}")
    return share


def _path(text: str) -> Path:
    if not text:  # which would stand for the present folder
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


# Commands


def _app(options: argparse.Namespace) -> None:
    _require("dash", "dash_mantine_components", "dash_ag_grid", extra="app")
    from workbench.app.main import serve
    from workbench.loading.pretrained import check_source

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    device = _checked_device(options.device)
    check_source(options.model)
    with suppress(KeyboardInterrupt):  # the way to stop it
        serve(
            model=options.model,
            device=device,
            port=options.port,
            open_browser=not options.no_browser,
            say=say,
        )


def _heads(options: argparse.Namespace) -> None:
    text = _text_of(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import head_statistics
        from workbench.analyses.inputs import text_to_tokens

        if text is None:
            tokens, seed = _random_tokens(model, options), getattr(options, "seed", 0)
            return head_statistics(model, tokens, seed=seed, progress=report)
        tokens = text_to_tokens(model, text, options.max_tokens, shorten=SHORTEN)
        return head_statistics(model, tokens, progress=report)

    _analyse(options, "heads", run)


def _induction(options: argparse.Namespace) -> None:
    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import induction_heads

        ablation = _given(options, ABLATION)
        return induction_heads(model, **_given(options, RANDOM), **ablation, progress=report)

    result = _analyse(options, "induction", run)
    if n_left := _heads_left_out(result):
        n_with_pattern, threshold = result.settings["n_ablated"] + n_left, result.settings["pattern_threshold"]
        heads, were = ("head reaches", "was") if n_left == 1 else ("heads reach", "were")
        sys.stdout.write(f"{n_left} more {heads} {threshold} but {were} not ablated: --ablate {n_with_pattern}\n")


def _heads_left_out(result: Result) -> int:
    """How many heads with the pattern were not ablated, although some were."""
    from workbench.analyses.scores import reaches

    n_with_pattern = int(reaches(result["prefix_matching"], result.settings["pattern_threshold"]).sum())
    return max(0, n_with_pattern - result.settings["n_ablated"]) if result.settings["n_ablated"] else 0


def _sinks(options: argparse.Namespace) -> None:
    text = _text_of(options)

    def run(model: Any, report: Callable) -> Result:
        from workbench.analyses import attention_sinks
        from workbench.analyses.inputs import text_to_sequences

        if text is None:
            tokens = _random_tokens(model, options)
        else:
            tokens = text_to_sequences(model, text, options.max_tokens, length=SINK_LENGTH)
        return attention_sinks(model, tokens, n_tokens=SINK_LENGTH, progress=report)

    _analyse(options, "sinks", run)


def _models(options: argparse.Namespace) -> None:
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


def _fetch(options: argparse.Namespace) -> None:
    from workbench.loading.progress import terminal_progress
    from workbench.loading.sources import fetch

    with terminal_progress() as report:
        folder = fetch(options.name, report)
    sys.stdout.write(f"{options.name} is in {folder}\n")


# What commands share


def _analyse(options: argparse.Namespace, name: str, run: Callable[[Any, Callable], Result]) -> Result:
    """Loads the model, runs the analysis with progress, writes --out, prints the result and returns it."""
    with output_folder(options.out) if options.out else nullcontext() as output:
        from workbench.loading.pretrained import load_pretrained
        from workbench.loading.progress import terminal_progress

        device = _checked_device(options.device)
        with terminal_progress() as report:
            model = load_pretrained(options.model, device=device, progress=report)
            result = run(model, lambda done, what: report(name.capitalize(), round(1000 * done), 1000))
        tables = result.tables()
        scores = scores_to_print(tables[""], list(options.scores), options.sort)
        if output is not None:
            with output.writing():
                _write(result, output.partial / name, tables)
    sys.stdout.write(result.summary() + "\n")
    print_heads(tables[""], {score: options.scores[score] for score in scores}, options.top)
    if output is not None:
        replaced = f"; replaced {', '.join(output.replaced)}" if output.replaced else ""
        sys.stderr.write(f"Written to {options.out}{replaced}\n")
    return result


def _write(result: Result, stem: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    from workbench.analyses.figures import write_html

    result.save(stem)
    for name, table in tables.items():
        table.to_csv(stem.with_name(f"{stem.name}{'_' * bool(name)}{name}.csv"), index=False)
    for kind in result.figure_kinds:
        write_html(result.figure(kind, captioned=True), stem.with_name(f"{stem.name}_{kind}.html"))


def _text_of(options: argparse.Namespace) -> str | None:
    """The text to analyse, read and checked before anything slow begins; None for random tokens."""
    from workbench.analyses.inputs import read_text
    from workbench.tokens import check_characters

    if options.random:
        if options.max_tokens is not None:
            raise WorkbenchError("--max-tokens shortens a text; random tokens have --length and --sequences")
        return None
    if given := [RANDOM[name] for name in _given(options, RANDOM)]:
        needs, them = ("needs", "it") if len(given) == 1 else ("need", "them")
        raise WorkbenchError(
            f"{' and '.join(given)} {needs} --random in place of a text; leave {them} out, or the text"
        )
    text = options.prompt if options.prompt is not None else read_text(options.text)
    check_characters(text)
    if not text.strip():
        raise WorkbenchError(f"{options.text or 'the prompt'} is empty; give some words to analyse")
    return text


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
