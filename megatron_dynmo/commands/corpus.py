"""`dynmo corpus`: a Megatron dataset and tokenizer from a folder of text."""

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_dynmo.corpus import Corpus, ProgressCallback, build_corpus

_NUM_UNDECODABLE_SHOWN = 3


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `corpus` to the `dynmo` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "corpus",
        help="make a Megatron dataset and tokenizer from a folder of text",
        description="Make a Megatron .bin/.idx dataset and a BPE tokenizer trained on it. Does "
        "nothing if OUT_DIR already holds the corpus of the same text and settings.",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder to make")
    parser.add_argument(
        "--source",
        metavar="PATH",
        nargs="+",
        action="extend",
        type=Path,
        help="text files, .jsonl files, or folders of them (hidden entries are left out); "
        "default: the Python standard library's own sources on this machine",
    )
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        type=int,
        default=4096,
        help="token ids, the end-of-document token included (default: %(default)s)",
    )
    parser.add_argument(
        "--jsonl-key",
        metavar="KEY",
        default="text",
        help="key of the text in each line of a .jsonl file (default: %(default)s)",
    )
    parser.add_argument("--max-bytes", metavar="N", type=int, help="use at most N bytes of text")
    parser.add_argument(
        "--force",
        action="store_true",
        help="build even if OUT_DIR is not empty; replaces a corpus, touches no other file",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the corpus and print what it holds and how Megatron reads it.

    Args:
        args: As parsed by the parser of `add_parser`.

    Returns:
        0; what cannot work is raised.

    Raises:
        ConfigError: See `build_corpus`.
    """
    with _progress_bar() as progress:
        corpus, is_reused = build_corpus(
            args.out_dir,
            sources=args.source,
            vocab_size=args.vocab_size,
            jsonl_key=args.jsonl_key,
            max_bytes=args.max_bytes,
            force=args.force,
            progress=progress,
        )
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if args.json:
        status = "reused" if is_reused else "built"
        console.print_json(data={"status": status, **asdict(corpus)}, highlight=False)
    else:
        _print_summary(console, corpus, is_reused, args)
    return 0


def _print_summary(
    console: Console, corpus: Corpus, is_reused: bool, args: argparse.Namespace
) -> None:
    intro = "Already there, unchanged" if is_reused else "Made"
    console.print(
        f"{intro}: {corpus.documents:,} documents, {corpus.text_bytes / 1e6:.1f} MB, "
        f"{corpus.tokens:,} tokens, vocabulary {corpus.vocab_size:,}, "
        f"from {', '.join(corpus.sources)}"
    )
    if corpus.truncated:
        console.print("The text goes on; --max-bytes ended it here.")
    if corpus.undecodable:
        shown = ", ".join(corpus.undecodable[:_NUM_UNDECODABLE_SHOWN])
        more = len(corpus.undecodable) - _NUM_UNDECODABLE_SHOWN
        console.print(
            f"Left out, not UTF-8 text: {len(corpus.undecodable)} of {corpus.files} files: {shown}"
            + (f" and {more} more (all in corpus.json)" if more > 0 else "")
        )
    if args.force:
        console.print(
            "If you use --data-cache-path, empty that folder: Megatron does not notice new data."
        )
    console.print(f"For Megatron:\n{shlex.join(corpus.megatron_args)}")


@contextmanager
def _progress_bar() -> Iterator[ProgressCallback]:
    """Show a bar on a terminal's standard error, nothing elsewhere; gone when done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading", total=None)

        def update(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total or None)

        yield update
