"""What the commands share: options, loading a model, errors of one line."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer


BUNDLED = "bundled"


class CacheName(str, Enum):
    """A cache that the commands can use."""

    replayssm = "replayssm"
    dynamic = "dynamic"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Model id on the Hub, or a folder.", metavar="ID_OR_PATH")
]
CacheOption = Annotated[CacheName, typer.Option("--cache", help="Which cache the model decodes through.")]
BufferLenOption = Annotated[
    int | None,
    typer.Option(
        "--buffer-len", help="Replay: tokens between two writes of the state (default: 16, of some models fewer)"
    ),
]
CheckpointDtypeOption = Annotated[
    str | None,
    typer.Option("--checkpoint-dtype", help="Replay: how the state is stored, e.g. int8 (default: float32)"),
]
RoundingOption = Annotated[
    str | None,
    typer.Option("--rounding", help="Replay: nearest, or with --checkpoint-dtype stochastic (default: nearest)"),
]
RoundingSeedOption = Annotated[
    int | None, typer.Option("--rounding-seed", help="Replay: the seed of --rounding stochastic (default: 0)")
]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Replay: triton, torch, or auto (default: auto)")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="Dtype of the weights (default: the checkpoint's; float32 if bundled)"),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, xpu, or auto.")]
DeviceMapOption = Annotated[
    str | None,
    typer.Option("--device-map", help='Spread the model over devices by accelerate, e.g. "auto"; --device is unused.'),
]
JsonOption = Annotated[
    str | None, typer.Option("--json", help='Write the result as JSON; "-" for standard output.', metavar="FILE")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and library warnings.")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """An error becomes one line on standard error and exit code 1; `--debug` lets the traceback through.

    Wrong options are typer's: a usage line and exit code 2.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        debug = kwargs.get("debug", False)
        if not debug:
            quiet_libraries()
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:  # the last resort of a command line
            if debug:
                raise
            where = "" if process() is None else f" in process {process()}"
            typer.echo(f"error{where}: {one_line(error)}", err=True)
            raise typer.Exit(1) from None

    return wrapped


def one_line(error: BaseException) -> str:
    """The error's message without line breaks; its type too where the message alone would not say what happened."""
    message = " ".join(str(error).split())
    # These are raised with a remedy, by us and by the libraries. Anything else is not expected here.
    expected = (ValueError, OSError, RuntimeError, ImportError, NotImplementedError)
    if not message or not isinstance(error, expected):
        message = f"{type(error).__name__}: {message} (run again with --debug for the traceback)"
    elif "out of memory" in message.lower():
        message = f"{message.split('.')[0]}. Use a smaller --batch-size, a shorter --context, or a smaller --dtype."
    return message


def quiet_libraries() -> None:
    """No warnings of the libraries, which are about their own defaults; no bars where nobody is watching."""
    import transformers

    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
        if "datasets" in sys.modules:
            sys.modules["datasets"].disable_progress_bars()
        else:  # not imported for this alone: not every command reads data
            os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def replay_fields(*, used: bool, **given: Any) -> dict[str, Any]:
    """The settings of the replay cache that were `given` (not None); a usage error if they would have no effect."""
    fields = {name: value for name, value in given.items() if value is not None}
    if fields and not used:
        names = ", ".join("--rounding-seed" if name == "seed" else "--" + name.replace("_", "-") for name in fields)
        raise typer.BadParameter(f"{names}: only the replay cache has this setting. Use --cache replayssm.")
    if fields:
        from hf_replayssm.config import ReplayConfig

        try:
            ReplayConfig.from_dict(fields)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return fields


def load_model(name: str, *, dtype: str | None, device: str, device_map: str | None = None) -> tuple[Any, Any]:
    """Model (in eval mode, on its device) and tokenizer, of an id, a folder, or the word "bundled"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_replayssm import bundled

    options: dict[str, Any] = {"dtype": parse_dtype(dtype)}
    if dtype is None:
        options["dtype"] = torch.float32 if name == BUNDLED else "auto"
    if device_map is not None:
        options["device_map"] = device_map
    place = None if device_map is not None else pick_device(device)
    path = bundled.target_path() if name == BUNDLED else name
    try:
        # Said outright, transformers refuses remote code instead of asking on the terminal.
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(explain_loading(str(path), error)) from error
    if place is not None:
        model = model.to(place)
    return model.eval(), tokenizer


def explain_loading(name: str, error: Exception) -> str:
    """What to do about a model that does not load."""
    first = one_line(error)
    if "trust_remote_code" in first:
        return (
            f"{name} needs remote code, which replay cannot patch. Use a checkpoint whose model type is one of "
            "transformers' own (see `hf-replayssm doctor`)."
        )
    if isinstance(error, OSError):
        if Path(name).is_dir():
            return f"The folder {name} does not hold a whole model: {first}"
        return (
            f"No model {name!r}: neither a folder here nor to be had from the Hub. Check the id and the network, log "
            f'in with `hf auth login` if it is gated, or use the bundled one ("{BUNDLED}"). ({first[:200]})'
        )
    return f"{name} could not be loaded: {first}"


def parse_dtype(dtype: str | None) -> Any:
    """A torch dtype from its name, "auto" and None as they are."""
    import torch

    if dtype is None or dtype == "auto":
        return dtype
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    value = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise typer.BadParameter(f"--dtype must be float32, bfloat16, float16 or auto, not {dtype!r}.")
    return value


def process() -> int | None:
    """The number of this process among those that a launcher (torchrun, accelerate launch) started; None if alone."""
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ else None


def pick_device(device: str) -> Any:
    """The torch device of that name; "auto" is the first accelerator, else the CPU.

    Of several processes on a machine each gets an accelerator of its own.
    """
    import torch

    if device == "auto":
        if process() is not None and torch.accelerator.is_available():
            kind, number = torch.accelerator.current_accelerator(), int(os.environ.get("LOCAL_RANK", 0))
            if number >= torch.accelerator.device_count():
                raise ValueError(
                    f"Process {process()} has no {kind.type} device of its own: there are "
                    f"{torch.accelerator.device_count()} here. Start as many processes as there are devices, or name "
                    "one with --device."
                )
            torch.accelerator.set_device_index(number)
            return torch.device(kind.type, number)
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        if hasattr(torch, "xpu") and torch.xpu.is_available():
            return torch.device("xpu")
        return torch.device("cpu")
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise typer.BadParameter(f"--device {device!r} cannot be used here: {one_line(error)[:200]}") from None
    return picked


def emit_json(values: dict[str, Any], target: str | None) -> None:
    """Write a result as JSON to a file, or to standard output for "-"."""
    if target is None:
        return
    from hf_replayssm.evaluation.perplexity import plain

    text = json.dumps(plain(values), indent=2, ensure_ascii=False)
    if target == "-":
        typer.echo(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def check_json_target(target: str | None) -> None:
    """A result that cannot be written should be said before the work, not after it."""
    if target not in (None, "-") and not Path(target).absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {target}: there is no folder {Path(target).absolute().parent}.")


def console(stderr: bool = False) -> Any:
    """A rich console. Wide where it is not a terminal, so that a line in a log or a pipe is not broken."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 140, soft_wrap=False)


def print_rows(out: Any, rows: list[tuple[str, str]]) -> None:
    """Two columns. As plain text, since a path may have brackets, and whole, since a cut path is of no use."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    out.print(table)


def count(value: float) -> str:
    """A count as people read it: 12,345."""
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes as people read them: 1.2 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def stats_rows(stats: dict[str, float]) -> list[tuple[str, str]]:
    """The cache's own counters, as rows of a table."""
    rows = []
    for name, value in stats.items():
        label = "cache: " + name.replace("_", " ")
        rows.append((label, size(value) if name.endswith(("_bytes", "_written")) else count(value)))
    written = stats.get("checkpoint_bytes_written", 0) + stats.get("input_bytes_written", 0)
    if stats.get("per_token_bytes") and written:
        rows.append(("cache: written / state at every forward", f"{written / stats['per_token_bytes']:.3f}"))
    return rows
