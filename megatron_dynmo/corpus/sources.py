"""Finds text files and reads the documents in them, always in the same order.

One document is one text file, or one line of a `.jsonl` file. Nothing here knows of tokens.
"""

import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from megatron_dynmo.errors import ConfigError

if TYPE_CHECKING:
    from hashlib import _Hash

_JSONL_SUFFIXES = {".jsonl", ".ndjson"}
_UTF8_BOM = b"\xef\xbb\xbf"
# Other people's packages, tests (odd on purpose) and tables of code points are poor text.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclass
class Tally:
    """What one pass over the documents has seen so far.

    Attributes:
        documents: Documents yielded.
        text_bytes: Their UTF-8 bytes.
        files: Files opened.
        empty_documents: Documents of white space alone, left out.
        undecodable: Files that are not UTF-8 text, left out, in reading order.
        truncated: Whether `max_bytes` left text out.
        digest: SHA-256 over every document yielded, with its length.
    """

    documents: int = 0
    text_bytes: int = 0
    files: int = 0
    empty_documents: int = 0
    undecodable: list[str] = field(default_factory=list)
    truncated: bool = False
    digest: "_Hash" = field(default_factory=sha256)

    def add(self, data: bytes) -> None:
        """Count one document, given as UTF-8."""
        self.documents += 1
        self.text_bytes += len(data)
        self.digest.update(len(data).to_bytes(8, "little"))
        self.digest.update(data)


class TextSources:
    """The documents of some files and folders; can be read any number of times.

    Folders are walked in sorted order, links to folders followed; hidden entries are left out and
    each file is read once, however many sources reach it.

    Attributes:
        names: The sources as given.
        files: Every file to read, in order.
    """

    def __init__(
        self,
        paths: Sequence[Path] | None,
        *,
        jsonl_key: str = "text",
        max_bytes: int | None = None,
        exclude: Path | None = None,
    ) -> None:
        """Find the files.

        Args:
            paths: Files and folders; None means the Python standard library's own sources.
            jsonl_key: Key that holds the text in each line of a `.jsonl` or `.ndjson` file.
            max_bytes: Read at most this many UTF-8 bytes; the last document is cut to fit.
            exclude: A folder to leave out, such as the one being written.

        Raises:
            ConfigError: If a source does not exist, is neither file nor folder, or is empty.
        """
        self._jsonl_key = jsonl_key
        self._max_bytes = max_bytes
        excluded = {exclude.resolve()} if exclude is not None else set()
        if paths is None:
            stdlib = Path(sysconfig.get_path("stdlib"))
            self.names = [f"Python {sys.version.split()[0]} standard library"]
            found = [p for p in _walk(stdlib, excluded, _STDLIB_SKIPPED) if p.suffix == ".py"]
        else:
            self.names = [show(path) for path in paths]
            found = [file for path in paths for file in _files_of(path, excluded)]
        first_mentions: dict[Path, Path] = {}
        for file in found:
            first_mentions.setdefault(file.resolve(), file)
        self.files = list(first_mentions.values())
        if not self.files:
            raise ConfigError(
                f"no text files in {', '.join(self.names)}: give --source a folder or file of text"
            )

    def documents(self, tally: Tally) -> Iterator[str]:
        """Yield each document, counting it in `tally` first.

        Args:
            tally: A fresh one for each pass; complete when the iterator is exhausted.

        Raises:
            ConfigError: If a file cannot be read or a JSONL line is wrong (file and line named).
        """
        for text in self._texts(tally):
            if not text.strip():
                tally.empty_documents += 1
                continue
            data = text.encode()
            room = None if self._max_bytes is None else self._max_bytes - tally.text_bytes
            if room is None or len(data) <= room:
                tally.add(data)
                yield text
                continue
            tally.truncated = True
            text = data[:room].decode(errors="ignore")
            if text.strip():
                tally.add(text.encode())
                yield text
            return

    def _texts(self, tally: Tally) -> Iterator[str]:
        for file in self.files:
            tally.files += 1
            try:
                if file.suffix.lower() in _JSONL_SUFFIXES:
                    yield from _jsonl_texts(file, self._jsonl_key)
                    continue
                raw = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {show(file)}: {error.strerror}") from error
            try:
                # UTF-8 allows NUL, text does not: it marks UTF-16 and binary files.
                if b"\0" in raw:
                    raise ValueError
                yield raw.removeprefix(_UTF8_BOM).decode()
            except ValueError:
                tally.undecodable.append(show(file))


def show(path: Path) -> str:
    """Return the path as printable text, also where its name is not valid UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _files_of(path: Path, excluded: set[Path]) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"--source {show(path)}: {error.strerror}; give an existing file or folder"
        ) from error
    if stat.S_ISDIR(mode):
        return list(_walk(path, excluded, set()))
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"--source {show(path)} is neither a file nor a folder (it is read more than once): "
            "save it to a file first"
        )
    return [path]


def _walk(root: Path, excluded: set[Path], skipped_names: set[str]) -> Iterator[Path]:
    """Yield the files below `root`, sorted; each real folder is entered once."""
    seen = set(excluded)

    def is_wanted(folder: Path) -> bool:
        if folder.name.startswith(".") or folder.name in skipped_names:
            return False
        return folder.resolve() not in seen

    def fail(error: OSError) -> None:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error

    if root.resolve() in seen:
        return
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=fail):
        seen.add(Path(folder).resolve())
        subfolders[:] = sorted(name for name in subfolders if is_wanted(Path(folder, name)))
        for name in sorted(names):
            file = Path(folder, name)
            # A dangling link goes through, so that reading it says so; a pipe would block.
            if not name.startswith(".") and (file.is_file() or not file.exists()):
                yield file


def _jsonl_texts(file: Path, key: str) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(_UTF8_BOM)
            if not line.strip():
                continue
            where = f"{show(file)}, line {number}"
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ConfigError(f"{where} is not JSON ({error}): correct the line") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{where} is not a JSON object: write {{{key!r}: ...}} there")
            if key not in record:
                keys = ", ".join(record) or "none"
                raise ConfigError(
                    f"{where} has no key {key!r} (its keys: {keys}): name the right one "
                    "with --jsonl-key"
                )
            if not isinstance(record[key], str):
                raise ConfigError(
                    f"{where}: {key!r} holds {type(record[key]).__name__}, not text: "
                    "name a key that holds text with --jsonl-key"
                )
            yield record[key]
