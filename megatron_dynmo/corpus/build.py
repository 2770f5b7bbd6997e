"""Makes a Megatron dataset and its tokenizer from text, the same bytes each time.

Three passes over the sources: count and fingerprint, train the tokenizer, write the tokens. Finding
and reading the text is in `corpus_sources`, the dataset's file format in `indexed_dataset`.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_dynmo.corpus.indexed_dataset import write_indexed_dataset
from megatron_dynmo.corpus.sources import Tally, TextSources, show
from megatron_dynmo.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
DATASET_NAME = "corpus_text_document"
# One id for each byte, so that every text can be written, and the end-of-document token.
MIN_VOCAB_SIZE = 257

_FORMAT = 1
_RECORD_NAME = "corpus.json"
_TOKENIZER_NAME = "tokenizer"
_DATA_FILES = (
    f"{DATASET_NAME}.bin",
    f"{DATASET_NAME}.idx",
    f"{_TOKENIZER_NAME}/tokenizer.json",
    f"{_TOKENIZER_NAME}/tokenizer_config.json",
    f"{_TOKENIZER_NAME}/special_tokens_map.json",
)
# More text than this no longer changes the merges much, but costs memory.
_TOKENIZER_TEXT_BYTES = 256 * 2**20
_ENCODE_BATCH_BYTES = 2**20

ProgressCallback = Callable[[str, int, int], None]
"""Called with the step's name, bytes done and bytes in all (0 while the total is unknown)."""


@dataclass(frozen=True)
class Corpus:
    """What `corpus.json` says.

    Attributes:
        format: Version of this record.
        fingerprint: SHA-256 of the documents and of the settings that shape the result.
        documents: Documents in the dataset.
        tokens: Tokens in the dataset, end-of-document tokens included.
        text_bytes: UTF-8 bytes of the documents.
        vocab_size: Token ids of the tokenizer, the end-of-document token included.
        end_of_document: The token that ends each document.
        sources: The sources as given.
        files: Files read.
        empty_documents: Documents of white space alone, left out.
        undecodable: Files that are not UTF-8 text, left out.
        truncated: Whether the byte limit left text out.
        tokenizer_bytes: UTF-8 bytes of the documents that the tokenizer was trained on.
        file_bytes: Size of each file of the corpus.
        megatron_args: The arguments that make Megatron read this corpus.
    """

    format: int
    fingerprint: str
    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    end_of_document: str
    sources: list[str]
    files: int
    empty_documents: int
    undecodable: list[str]
    truncated: bool
    tokenizer_bytes: int
    file_bytes: dict[str, int]
    megatron_args: list[str]


def build_corpus(
    out_dir: Path,
    *,
    sources: Sequence[Path] | None = None,
    vocab_size: int = 4096,
    jsonl_key: str = "text",
    max_bytes: int | None = None,
    force: bool = False,
    progress: ProgressCallback = lambda step, done, total: None,
) -> tuple[Corpus, bool]:
    """Make the corpus in `out_dir`, or find that it is there already.

    All files are made in a temporary folder beside `out_dir` and moved into place at the end,
    `corpus.json` last, so a folder with that file is complete.

    Args:
        out_dir: Folder to make. Files in it that are no part of a corpus are never touched.
        sources: Files and folders of text; None means the Python standard library's sources.
        vocab_size: Token ids wanted, the end-of-document token included.
        jsonl_key: Key of the text in `.jsonl` files.
        max_bytes: Use at most this many bytes of text.
        force: Build even if `out_dir` holds something, replacing a corpus there.
        progress: Called as the work goes on.

    Returns:
        The corpus, and whether it was there already (same text, same settings).

    Raises:
        ConfigError: If the settings, the sources or `out_dir` cannot be used; says what to change.
    """
    out_dir = Path(os.path.abspath(out_dir))
    _check_settings(out_dir, vocab_size, max_bytes)
    try:
        present = None if force else _read_present(out_dir)
        text = TextSources(sources, jsonl_key=jsonl_key, max_bytes=max_bytes, exclude=out_dir)
        tally = _scan(text, progress)
        fingerprint = _fingerprint(tally, vocab_size)
        if present is not None:
            _check_same(present, fingerprint, out_dir)
            return replace(present, megatron_args=_megatron_args(out_dir, vocab_size)), True
        with _scratch_folder(out_dir) as made:
            tokens, tokenizer_bytes = _make_files(made, text, tally, vocab_size, progress)
            corpus = Corpus(
                format=_FORMAT,
                fingerprint=fingerprint,
                documents=tally.documents,
                tokens=tokens,
                text_bytes=tally.text_bytes,
                vocab_size=vocab_size,
                end_of_document=END_OF_DOCUMENT,
                sources=text.names,
                files=tally.files,
                empty_documents=tally.empty_documents,
                undecodable=tally.undecodable,
                truncated=tally.truncated,
                tokenizer_bytes=tokenizer_bytes,
                file_bytes={name: (made / name).stat().st_size for name in _DATA_FILES},
                megatron_args=_megatron_args(out_dir, vocab_size),
            )
            _write_json(made / _RECORD_NAME, asdict(corpus))
            _install(made, out_dir)
    except OSError as error:
        raise ConfigError(f"cannot write the corpus to {show(out_dir)}: {error}") from error
    return corpus, False


def _check_settings(out_dir: Path, vocab_size: int, max_bytes: int | None) -> None:
    if out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f"{show(out_dir)} is a file: name a folder for the corpus")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and the end-of-document token "
            f"need at least {MIN_VOCAB_SIZE}"
        )
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"--max-bytes {max_bytes} leaves no text: give 1 or more")


@contextmanager
def _scratch_folder(out_dir: Path) -> Iterator[Path]:
    """Give a folder on the file system of `out_dir`; what is left of it goes at the end."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{out_dir.name}.", dir=out_dir.parent, ignore_cleanup_errors=True
    ) as scratch:
        # A folder inside it, because the temporary folder itself is readable by its owner only.
        made = Path(scratch, "made")
        made.mkdir()
        yield made


def _make_files(
    made: Path, text: TextSources, scanned: Tally, vocab_size: int, progress: ProgressCallback
) -> tuple[int, int]:
    """Write the dataset and the tokenizer; returns the tokens and the bytes trained on."""
    tokenizer, tokenizer_bytes = _train_tokenizer(text, scanned, vocab_size, progress)
    _save_tokenizer(tokenizer, made / _TOKENIZER_NAME)
    documents = _encode(text, scanned, tokenizer, progress)
    tokens = write_indexed_dataset(made / DATASET_NAME, documents, vocab_size=vocab_size)
    return tokens, tokenizer_bytes


def _read_present(out_dir: Path) -> Corpus | None:
    """Return the corpus in `out_dir`, None if the folder is free; refuse anything else."""
    where = show(out_dir)
    if not out_dir.exists() or not any(out_dir.iterdir()):
        return None
    record = out_dir / _RECORD_NAME
    if not record.exists():
        raise ConfigError(
            f"{where} is not empty and holds no corpus: name another folder, or give --force "
            "to put the corpus beside what is there"
        )
    try:
        corpus = Corpus(**json.loads(record.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{show(record)} is not a record of this version: give --force to replace the corpus"
        ) from error
    for name, size in corpus.file_bytes.items():
        file = out_dir / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            raise ConfigError(
                f"{show(file)} has {found} bytes where the corpus was made with {size}: "
                "give --force to make it again"
            )
    return corpus


def _check_same(present: Corpus, fingerprint: str, out_dir: Path) -> None:
    if present.fingerprint != fingerprint:
        raise ConfigError(
            f"{show(out_dir)} holds another corpus ({present.documents} documents, "
            f"{present.text_bytes} bytes, vocabulary {present.vocab_size}, from "
            f"{', '.join(present.sources)}): name another folder, or give --force to replace it"
        )


def _scan(text: TextSources, progress: ProgressCallback) -> Tally:
    tally = Tally()
    for _ in text.documents(tally):
        progress("reading", tally.text_bytes, 0)
    if not tally.documents:
        raise ConfigError(
            f"no text in {', '.join(text.names)} (files read: {tally.files}, not UTF-8 text: "
            f"{len(tally.undecodable)}, empty documents: {tally.empty_documents}): "
            "give --source a folder or file of UTF-8 text"
        )
    return tally


def _fingerprint(tally: Tally, vocab_size: int) -> str:
    settings = f"{_FORMAT} {vocab_size} {END_OF_DOCUMENT} {_TOKENIZER_TEXT_BYTES} "
    return sha256(settings.encode() + tally.digest.digest()).hexdigest()


def _train_tokenizer(
    text: TextSources, scanned: Tally, vocab_size: int, progress: ProgressCallback
) -> tuple[Any, int]:
    """Train a byte-level BPE; returns it and the bytes of text that it saw."""
    # Imported here: a corpus that is there already must be recognised at once.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained_bytes = 0

    def sample() -> Iterator[str]:
        """Yield documents spread evenly over the text, up to the limit."""
        nonlocal trained_bytes
        tally = Tally()
        for document in text.documents(tally):
            progress("training the tokenizer", tally.text_bytes, scanned.text_bytes)
            if trained_bytes * scanned.text_bytes <= tally.text_bytes * _TOKENIZER_TEXT_BYTES:
                trained_bytes += len(document.encode())
                yield document

    tokenizer.train_from_iterator(sample(), trainer)
    supported = tokenizer.get_vocab_size()
    if supported != vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is more than the text supports ({trained_bytes} bytes give "
            f"{supported}): give --vocab-size {supported} or less, or more text"
        )
    return tokenizer, trained_bytes


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files from which transformers' AutoTokenizer loads without network."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"eos_token": END_OF_DOCUMENT}
    _write_json(folder / "special_tokens_map.json", special_tokens)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special_tokens,
        },
    )


def _encode(
    text: TextSources, scanned: Tally, tokenizer: Any, progress: ProgressCallback
) -> Iterator[list[int]]:
    """Yield the token ids of each document with the end-of-document token at its end."""
    end_of_document = tokenizer.token_to_id(END_OF_DOCUMENT)
    # That token's text inside a document is text, not the document's end.
    tokenizer.encode_special_tokens = True
    tally = Tally()
    for batch in _batches(text.documents(tally)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield [*encoding.ids, end_of_document]
        progress("writing the dataset", tally.text_bytes, scanned.text_bytes)
    if tally.digest.digest() != scanned.digest.digest():
        raise ConfigError(
            f"{', '.join(text.names)} changed while being read ({scanned.documents} documents, "
            f"then {tally.documents}): run again when nothing writes there"
        )


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _megatron_args(out_dir: Path, vocab_size: int) -> list[str]:
    return [
        *("--data-path", str(out_dir / DATASET_NAME)),
        *("--tokenizer-type", "HuggingFaceTokenizer"),
        *("--tokenizer-model", str(out_dir / _TOKENIZER_NAME)),
        *("--vocab-size", str(vocab_size)),
    ]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def _install(made: Path, out_dir: Path) -> None:
    """Move the finished files into place; `corpus.json` leaves first and comes last."""
    if not out_dir.exists():
        made.rename(out_dir)
        return
    (out_dir / _RECORD_NAME).unlink(missing_ok=True)
    # Megatron keeps its index of the old dataset in the folder named as the dataset.
    for name in (_TOKENIZER_NAME, DATASET_NAME):
        shutil.rmtree(out_dir / name, ignore_errors=True)
    for name in (*_DATA_FILES[:2], _TOKENIZER_NAME, _RECORD_NAME):
        (made / name).replace(out_dir / name)
