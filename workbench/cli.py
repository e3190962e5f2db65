"""The command ``workbench``. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 something is wrong with the input (one line says what, and what to do), 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from workbench import commands
from workbench.analyses.labels import HEAD_SCORES, INDUCTION_SCORES, SINK_SCORES
from workbench.errors import WorkbenchError, ran_out_of_memory

PICTURES = ("svg", "pdf", "png")
SPACINGS = ("fixed", "random gaps")


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
            arguments = sys.argv[1:] if arguments is None else arguments
            options = _parser().parse_args(arguments)
            options.command = shlex.join(["workbench", *arguments])
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
        return _refuse("not enough memory; give a smaller input (--max-tokens, --n-prompts) or choose a smaller model")
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
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    app = verbs.add_parser("app", help="open the dashboard in the browser", description="Opens the dashboard.")
    app.add_argument("--model", default="demo", help="what it opens on (default: the bundled demo model)")
    app.add_argument("--port", type=_port, default=8050, help="where it listens; a taken port gives the next free one")
    _add_device(app)
    app.add_argument("--text", type=_path, metavar="FILE", help="a UTF-8 text file to look at")
    app.add_argument("--open", metavar="FILE", help="a saved result (.json or .npz) to look at")
    app.add_argument("--no-browser", action="store_true", help="do not open a browser, only print the address")
    app.set_defaults(run=commands.app)

    heads = _analysis(verbs, "heads", "every statistic of every head on a text", commands.heads)
    _add_input(heads, or_random=True)
    _add_random(heads)
    _add_table(heads, HEAD_SCORES)

    induction = _analysis(verbs, "induction", "induction heads, and what their ablation costs", commands.induction)
    _add_random(induction)
    _add_ablation(induction)
    _add_table(induction, INDUCTION_SCORES)

    sinks = _analysis(verbs, "sinks", "attention sinks: where, in which heads, what they carry", commands.sinks)
    _add_input(sinks, or_random=True)
    _add_random(sinks)
    _add_table(sinks, SINK_SCORES)

    lens = _analysis(
        verbs, "lens", "what the model would predict if it stopped at each layer (logit lens)", commands.lens
    )
    _add_input(lens)

    purpose = "whether attention says which heads matter, or which tokens: ablation and gradients beside it"
    attribute = _analysis(verbs, "attribute", purpose, commands.attribute)
    _add_prompts(attribute)
    attribute.add_argument(
        "--tokens", action="store_true", help="ask it of the prompts' tokens, each of which is knocked out"
    )
    attribute.add_argument(
        "--top", type=_positive, default=12, metavar="N", help="how many heads or tokens to print (default: 12)"
    )

    prune = _analysis(verbs, "prune", "how few heads are enough, and which ranking finds them", commands.prune)
    _add_prompts(prune)

    models = verbs.add_parser("models", help="list the models known by name", description="Lists the known models.")
    models.set_defaults(run=commands.models)
    fetch = verbs.add_parser("fetch", help="download a known model once", description="Downloads a known model.")
    fetch.add_argument("name", metavar="NAME", help="a name that `workbench models` lists")
    fetch.set_defaults(run=commands.fetch)
    return parser


class _Version(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, help="print the version and exit", **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version  # here, as it takes a tenth of a second

        sys.stdout.write(f"workbench {version('attention-workbench')}\n")
        parser.exit()


def _analysis(verbs: Any, name: str, purpose: str, run: Callable) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    parser.add_argument("model", metavar="MODEL", help="a known name, a Hugging Face id, a folder or a GGUF file")
    parser.add_argument(
        "--out", type=_path, metavar="DIR",
        help="also write the result, its figures (HTML), its tables (CSV) and a report of it all (HTML)",
    )  # fmt: skip
    parser.add_argument(
        "--format", type=_formats, default=(), dest="formats", metavar="KIND[,KIND]",
        help="with --out, the figures as pictures too: svg, pdf or png, at the width of a page (needs a Chromium)",
    )  # fmt: skip
    _add_device(parser)
    parser.set_defaults(run=run)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where the model runs, for instance cuda (default: cpu)")


def _add_input(parser: argparse.ArgumentParser, *, or_random: bool = False) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the text itself")
    source.add_argument("--text", type=_path, metavar="FILE", help="a UTF-8 text file")
    if or_random:
        source.add_argument("--random", action="store_true", help="random tokens that repeat")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="keep only the first N tokens of the text")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    names = ", ".join(commands.TASKS)
    source.add_argument("--task", choices=commands.TASKS, metavar="TASK", help=f"prompts that come along: {names}")
    source.add_argument(
        "--prompts", type=_path, metavar="FILE",
        help="your own, one JSON object a line: prompt, target, and perhaps foil (a wrong answer) and corrupted (a "
        "prompt of as many tokens that calls for another answer)",
    )  # fmt: skip
    parser.add_argument(
        "--n-prompts", type=_positive, default=argparse.SUPPRESS, metavar="N", help="how many of the task (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default: 0)")


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


def _formats(text: str) -> tuple[str, ...]:
    formats = tuple(dict.fromkeys(text.lower().split(",")))
    if unknown := [name for name in formats if name not in PICTURES]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PICTURES)}, with commas between, got {unknown[0]!r}")
    return formats


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)
