"""The command line as a process: what it does when its streams, its reader or its user leave."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "workbench"]


def in_shell(line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell line in which "$@" stands for the command with its arguments."""
    return subprocess.run(["bash", "-c", line, "bash", *COMMAND, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["models"],
        ["fetch", "demo"],
        ["heads", "demo", "--prompt", "a b c"],
        ["induction", "demo", "--length", "8", "--sequences", "2"],
        ["sinks", "demo", "--random", "--length", "16", "--sequences", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]) -> None:
    done = in_shell('"$@" | true; exit ${PIPESTATUS[0]}', *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_line() -> None:
    for line, said in (('"$@" >&-', "standard output is closed"), ('"$@" >/dev/full', "No space left on device")):
        done = in_shell(line, "models")
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1
    assert in_shell('"$@" 2>&-', "models").stdout and in_shell('"$@" >&- 2>&-', "models").returncode == 1


@pytest.mark.parametrize("kilobytes", [1, 500], ids=["at the result", "at the figures"])
def test_a_disk_that_fills_up_is_named_and_left_clean(kilobytes: int, tmp_path: Path) -> None:
    done = in_shell(
        f'ulimit -f {kilobytes}; "$@"', "heads", "demo", "--prompt", "a b c", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"cannot write into {tmp_path / 'out'}: File too large; name another folder with --out" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_an_encoding_without_our_quotation_marks(encoding: str) -> None:
    """Those become question marks; on standard error just as well."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([*COMMAND, "heads", "demo", "--prompt", "a b “c”"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"?a b ?c??" in done.stdout
    done = subprocess.run([*COMMAND, "heads", "“demo”", "--prompt", "a"], env=environment, capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith(b"workbench: ") and b"?demo?" in done.stderr


def test_the_module_is_the_command_wherever_it_is_called_from() -> None:
    repository = Path(__file__).parents[2]  # its folder `kernels` must not become transformers' package of that name
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [*COMMAND, "heads", "demo", "--prompt", "a b c"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and re.search(r"L\dH\d", done.stdout)


def test_an_interrupted_process_cleans_up(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "induction", "demo", "--length", "40", "--sequences", "4000", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not any(tmp_path.iterdir()):  # the folder that results are gathered in
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM and out == "" and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_the_app_takes_the_next_free_port_and_stops_on_interrupt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [*COMMAND, "app", "--no-browser", "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & ignores it
        )  # fmt: skip
        try:
            assert process.stdout is not None
            first, second = process.stdout.readline(), process.stdout.readline()
            found = re.fullmatch(rf"Port {port} is taken; using (\d+).\n", first)
            assert found and int(found[1]) > port
            address = f"http://127.0.0.1:{found[1]}/"
            assert address in second
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert answer.status == 200 and b"Attention Workbench" in answer.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
