"""What is finished of an evaluation, in a folder: a run that was killed goes on from there.

`settings.json` says what is evaluated and how; each process appends to a `finished-*.jsonl` of its own, one line per
finished batch. A line that was cut short by a kill, or is damaged otherwise, is no line: its batch is evaluated again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .contexts import Context


SETTINGS = "settings.json"
BLOCK = 2**20  # numbers of 64 bits whose sum is taken at a time


class Finished:
    """The finished batches of an evaluation, by their number, in `folder`.

    Args:
        folder: made if it is not there.
        settings: all that the result depends on, as JSON has it; compared with what the folder was begun with.
        main: whether this process looks after the folder; the others only add to it.

    Raises:
        ValueError: the folder is of another evaluation (every setting that differs is named), or of something else, or
            its settings are damaged.
    """

    def __init__(self, folder: str | os.PathLike, settings: dict[str, Any], main: bool = True):
        self.folder = Path(folder)
        self.records: dict[int, dict[str, Any]] = {}
        self._file = None
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(
                f"{self.folder} is a file. Name a folder for what is finished, or one that does not exist."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not main:
            return
        known = self.folder / SETTINGS
        part = known.with_suffix(".part")  # all that is there of a run that was killed while it wrote them
        if known.exists():
            self._compare(_settings_in(known), settings)
            for file in sorted(self.folder.glob("finished-*.jsonl")):
                self._read(file)
        elif any(file != part for file in self.folder.iterdir()):
            raise ValueError(
                f"The folder {self.folder} holds other files and no {SETTINGS}. Name an empty folder, or one that does "
                "not exist."
            )
        else:
            part.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            part.replace(known)

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        now = json.loads(json.dumps(now))
        changes = ", ".join(_changes(before, now))
        if changes:
            raise ValueError(
                f"The folder {self.folder} holds what is finished of another evaluation: {changes}. Give the same "
                "settings, or another folder."
            )

    def _read(self, file: Path) -> None:
        for line in file.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # no JSON, or no UTF-8
                continue
            if _is_record(record):
                self.records.setdefault(record["batch"], record)

    def add(self, record: dict[str, Any]) -> None:
        """Write one finished batch; it is on the disk when this returns."""
        if self._file is None:
            self._file = open(self.folder / f"finished-{uuid.uuid4().hex[:12]}.jsonl", "x", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def check(self, number: int, batch: list[Context]) -> None:
        """Raises ValueError if the finished batch of that number was of other tokens than `batch`."""
        record = self.records.get(number)
        if record is not None and record["inputs"] != digest(batch):
            raise ValueError(
                f"The folder {self.folder} holds what is finished of other documents: batch {number} (document "
                f"{batch[0].document}) has other tokens now. Give the same data and tokenizer, or another folder."
            )


def _settings_in(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_bytes())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{file} is damaged, so nobody knows of what evaluation the finished batches beside it are. Name another "
            "folder, or delete this one."
        )
    return settings


def _is_record(record: Any) -> bool:
    """Whether this is all of what is written down of a finished batch, in the types that it is written in."""
    try:
        sums = [sums for index, sums in record["by_position"].items() if int(index) >= 0]
        return (
            all(isinstance(record[name], int) and record[name] >= 0 for name in ("batch", "tokens", "process"))
            and all(isinstance(record[name], str) for name in ("inputs", "run"))
            and all(isinstance(document, int) and math.isfinite(nll) for document, nll in record["contexts"])
            and all(isinstance(one["tokens"], int) and math.isfinite(one["nll"]) for one in sums)
            and sum(one["tokens"] for one in sums) == record["tokens"]
            and math.isfinite(record["seconds"])
            and all(math.isfinite(value) for value in (record["stats"] or {}).values())
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return False


def digest(batch: list[Context]) -> str:
    """Of the tokens of a batch, and of which of them are scored."""
    sha = hashlib.sha256()
    for context in batch:
        sha.update(f"{context.document} {context.start} {context.first_scored} {len(context.inputs)} ".encode())
        sha.update(context.inputs.numpy().tobytes())
        sha.update(context.targets[-1:].numpy().tobytes())
    return sha.hexdigest()[:20]


def weights_digest(model: torch.nn.Module) -> str:
    """Of the names and shapes of all parameters, and of their values: all of them, and where they stand.

    Parameters that are offloaded count with name and shape only.
    """
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        for tensor in _parts(parameter.detach()):
            if tensor.device.type != "meta" and tensor.numel():
                sha.update(_sums_of_bits(tensor))
    return sha.hexdigest()[:20]


def _sums_of_bits(tensor: torch.Tensor) -> bytes:
    """Of each block of a tensor's bits, read as integers of 64: their sum modulo 2^64, each times an odd number of its
    place; and what is left at the end. Taken where it lies, and the same with any number of threads."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole, rest = flat[: len(flat) // 8 * 8], flat[len(flat) // 8 * 8 :]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    blocks = whole.view(torch.int64).split(BLOCK)
    weights = 2 * torch.arange(len(blocks[0]), device=flat.device) + 1
    sums = torch.stack([(block * weights[: len(block)]).sum() for block in blocks])
    return sums.cpu().numpy().tobytes() + rest.cpu().numpy().tobytes()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors in one: its own of a quantised one, this process's of one that is spread over several."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _changes(before: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[str]:
    """What differs, in words; of settings that have settings of their own, these."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name} was {old!r} and is {new!r}"
