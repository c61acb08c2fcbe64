"""Documents to evaluate on: a `datasets` data set from the Hub, or a local file read through `datasets`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


# What `datasets` calls the reader of a file, by the file's ending (a compression suffix is looked through).
FILE_READERS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
# Which split is taken when none is named: held-out data first.
PREFERRED_SPLITS = ("test", "validation", "valid", "dev")
TEXT_UNITS = ("paragraph", "line", "file")


def load_documents(
    source: str | os.PathLike,
    *,
    config: str | None = None,
    split: str | None = None,
    column: str | None = None,
    streaming: bool = False,
    text_unit: str = "paragraph",
    revision: str | None = None,
) -> list[str] | Iterator[str]:
    """Load the documents of a data set.

    Args:
        source: a data set id of the Hub (`"Salesforce/wikitext"`), or a local file ending in .txt, .md, .jsonl,
            .json, .csv, .tsv or .parquet (also with .gz, .bz2, .xz, .zst or .lz4 behind it).
        config: the configuration of a Hub data set that has several, such as `"wikitext-2-raw-v1"`.
        split: the split, slices such as `"test[:100]"` included. Left out: test, else validation, else the first.
            A local file has only one, so naming another than "train" for it is an error.
        column: the column that holds the text. Left out: "text", else the only column of strings.
        streaming: read a Hub data set while it is evaluated, instead of downloading it first. For any source it makes
            the result an iterator, read as it is used, instead of a list.
        text_unit: what one document of a *text* file is: "paragraph" (separated by an empty line), "line", or "file".
        revision: revision of a Hub data set.

    Returns:
        One string per row, empty ones included (the evaluation skips and counts them).

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: no text column (the columns are listed), an unknown split, configuration or kind of file, or a
            data set that the Hub does not have.
    """
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"text_unit must be one of {', '.join(TEXT_UNITS)}, not {text_unit!r}.")
    path = Path(source).expanduser()
    if _is_local(path):
        rows = _open_file(path, split=split, config=config, text_unit=text_unit)
    else:
        rows = _open_hub(str(source), config=config, split=split, streaming=streaming, revision=revision)
    documents = _column(rows, column, str(source))
    return documents if streaming else list(documents)


def join_documents(documents: Iterable[str], separator: str = "\n\n") -> list[str]:
    """All documents as one stream: a list of one string, the non-empty documents joined by `separator`.

    Evaluated with `carry_state=True`, the cache is then never reset.
    """
    return [separator.join(text for text in documents if text and text.strip())]


# ------------------------------------------------------------------------------------------------------- sources
def _ending(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_local(path: Path) -> bool:
    # A data set id is "name" or "owner/name". What exists, what ends like a data file, and what is written like a path
    # is meant as a file: a misspelt file name should not end in a question to the Hub.
    written = os.fspath(path)
    return (
        path.exists() or _ending(path) in FILE_READERS or path.is_absolute() or len(path.parts) > 2 or written[0] == "."
    )


def _open_file(path: Path, *, split: str | None, config: str | None, text_unit: str):
    from datasets import load_dataset

    if not path.exists():
        raise FileNotFoundError(
            f"There is no file {path}. Give the path of a text, jsonl, csv or parquet file, or the id of a data set on "
            'the Hub (such as "Salesforce/wikitext").'
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Name one file in it (text, jsonl, csv or parquet).")
    if config is not None:
        raise ValueError(f"{path} is a local file, which has no configuration: leave `config` out.")
    if split not in (None, "train"):
        raise ValueError(f"{path} is a local file, which has no split {split!r}: leave `split` out.")
    ending = _ending(path)
    reader = FILE_READERS.get(ending)
    if reader is None:
        raise ValueError(
            f"{path} ends in {ending or 'nothing'}, so its format is unknown. Rename it to one of "
            f"{', '.join(FILE_READERS)}."
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: there is no text in it.")
    options = {}
    if reader == "text":
        options["sample_by"] = {"paragraph": "paragraph", "line": "line", "file": "document"}[text_unit]
    elif ending == ".tsv":
        options["sep"] = "\t"
    # Streaming: the file is read where it lies, and no copy of it is written to the `datasets` cache.
    try:
        return load_dataset(reader, data_files=str(path), split="train", streaming=True, **options)
    except Exception as error:
        raise _unreadable(str(path), error) from error


def _open_hub(name: str, *, config: str | None, split: str | None, streaming: bool, revision: str | None):
    import datasets

    try:
        if split is None:
            available = datasets.get_dataset_split_names(name, config, revision=revision)
            split = next((wanted for wanted in PREFERRED_SPLITS if wanted in available), available[0])
        return datasets.load_dataset(name, config, split=split, streaming=streaming, revision=revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"No data set {name!r} on the Hub, or no access to it ({_first_line(error)}). Check the id, log in with "
            "`hf auth login` if it is gated, or give the path of a local text, jsonl, csv or parquet file."
        ) from error
    except (ConnectionError, OSError) as error:
        raise ValueError(
            f"The data set {name!r} could not be fetched from the Hub ({_first_line(error)}). Check the network (and "
            "HF_HUB_OFFLINE), or give the path of a local text, jsonl, csv or parquet file."
        ) from error
    except ValueError as error:
        # `datasets` names the configurations or splits that exist.
        raise ValueError(f"The data set {name!r} could not be opened: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------------------------------------- columns
def _column(rows, column: str | None, source: str) -> Iterator[str]:
    """The text of each row. The column is checked on the first row, before anything is returned."""
    iterator = _readable(rows, source)
    first = next(iterator, None)
    if first is None:
        raise ValueError(f"{source} has no rows.")
    columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in first.items())
    if column is None:
        strings = [name for name, value in first.items() if isinstance(value, str)]
        # A first row without text (None) in a column named "text" is still that column.
        column = "text" if "text" in first else strings[0] if len(strings) == 1 else None
        if column is None:
            found = "no column of strings" if not strings else "several columns of strings and none named 'text'"
            raise ValueError(f"{source} has {found}. Name the text column; its columns are: {columns}.")
    if column not in first:
        raise ValueError(f"{source} has no column {column!r}. Its columns are: {columns}.")
    if not isinstance(first[column], (str, type(None))):
        kind = type(first[column]).__name__
        raise ValueError(f"Column {column!r} of {source} holds {kind}, not text. Its columns are: {columns}.")
    return _texts(itertools.chain([first], iterator), column, source)


def _readable(rows: Iterable[dict], source: str) -> Iterator[dict]:
    """The rows. What goes wrong in reading them (no UTF-8, another format than the name says) names the source."""
    try:
        yield from rows
    except Exception as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: BaseException) -> ValueError:
    return ValueError(
        f"{source} could not be read ({_first_line(error)}). It takes UTF-8 text, or the format that its name says."
    )


def _texts(rows: Iterable[dict], column: str, source: str) -> Iterator[str]:
    for index, row in enumerate(rows):
        text = row[column]
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"Column {column!r} of {source} holds {type(text).__name__}, not text, in row {index}.")
        yield text
