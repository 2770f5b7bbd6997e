import argparse
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_dynmo.commands import corpus as command
from megatron_dynmo.corpus import DATASET_NAME, END_OF_DOCUMENT, build_corpus
from megatron_dynmo.corpus import build as corpus_module
from megatron_dynmo.corpus.sources import Tally, TextSources
from megatron_dynmo.errors import ConfigError

WORDS = "layers move between pipeline stages while training goes on and nothing changes "
VOCAB = 280


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text(WORDS * 20, encoding="utf-8")
    (folder / "a.md").write_text("één naïve café\r\n" + WORDS * 3, encoding="utf-8", newline="")
    (folder / "sub" / "c.txt").write_text(f"before {END_OF_DOCUMENT} after", encoding="utf-8")
    return folder


def read_documents(folder: Path) -> list[list[int]]:
    """Read the dataset by its lengths alone (the index itself is tested against Megatron)."""
    record = json.loads((folder / "corpus.json").read_text())
    tokens = np.fromfile(folder / f"{DATASET_NAME}.bin", dtype="<u2")
    assert len(tokens) == record["tokens"]
    lengths = np.fromfile(
        folder / f"{DATASET_NAME}.idx", dtype="<i4", offset=34, count=record["documents"]
    )
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_documents_come_back_letter_for_letter_and_end_with_the_token(source, tmp_path):
    out = tmp_path / "out"
    corpus, is_reused = build_corpus(out, sources=[source], vocab_size=VOCAB)
    assert not is_reused
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB == corpus.vocab_size
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    documents = read_documents(out)
    files = [source / "a.md", source / "b.txt", source / "sub" / "c.txt"]
    assert len(documents) == len(files) == corpus.documents
    for tokens, file in zip(documents, files, strict=True):
        assert tokens[-1] == end
        # The same words inside a text are not an end.
        assert end not in tokens[:-1]
        assert tokenizer.decode(tokens[:-1], skip_special_tokens=False).encode() == (
            file.read_bytes()
        )
    assert corpus.text_bytes == sum(file.stat().st_size for file in files)


def test_same_bytes_on_a_rerun(source, tmp_path):
    out = tmp_path / "out"
    build_corpus(out, sources=[source], vocab_size=VOCAB)
    first = all_bytes(out)
    assert set(first) == {
        "corpus.json",
        f"{DATASET_NAME}.bin",
        f"{DATASET_NAME}.idx",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/special_tokens_map.json",
    }
    build_corpus(out, sources=[source], vocab_size=VOCAB, force=True)
    assert all_bytes(out) == first


def test_same_corpus_is_recognised_and_left_alone(source, tmp_path):
    out = tmp_path / "out"
    made, _ = build_corpus(out, sources=[source], vocab_size=VOCAB)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    found, is_reused = build_corpus(out, sources=[source], vocab_size=VOCAB)
    assert is_reused
    assert found == made
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_moved_corpus_names_its_new_place(source, tmp_path):
    build_corpus(tmp_path / "out", sources=[source], vocab_size=VOCAB)
    (tmp_path / "out").rename(tmp_path / "moved")
    found, is_reused = build_corpus(tmp_path / "moved", sources=[source], vocab_size=VOCAB)
    assert is_reused
    assert found.megatron_args[1] == str(tmp_path / "moved" / DATASET_NAME)


@pytest.mark.parametrize("change", ["text", "vocabulary", "limit"])
def test_another_corpus_is_not_overwritten_without_force(source, tmp_path, change):
    out = tmp_path / "out"
    build_corpus(out, sources=[source], vocab_size=VOCAB)
    before = all_bytes(out)
    settings = {"vocab_size": VOCAB}
    if change == "text":
        (source / "b.txt").write_text(WORDS * 21)
    elif change == "vocabulary":
        settings["vocab_size"] = VOCAB + 1
    else:
        settings["max_bytes"] = 1000
    with pytest.raises(ConfigError, match=r"holds another corpus .* vocabulary 280.*--force"):
        build_corpus(out, sources=[source], **settings)
    assert all_bytes(out) == before
    _, is_reused = build_corpus(out, sources=[source], force=True, **settings)
    assert not is_reused
    _, is_reused = build_corpus(out, sources=[source], **settings)
    assert is_reused


def test_force_replaces_the_corpus_and_megatrons_index_but_no_other_file(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is not empty and holds no corpus"):
        build_corpus(out, sources=[source], vocab_size=VOCAB)
    build_corpus(out, sources=[source], vocab_size=VOCAB, force=True)
    stale_index = out / DATASET_NAME / "cache" / "GPTDataset_indices" / "x.npy"
    stale_index.parent.mkdir(parents=True)
    stale_index.write_bytes(b"old")
    build_corpus(out, sources=[source], vocab_size=VOCAB + 1, force=True)
    assert (out / "mine.txt").read_text() == "keep"
    assert not (out / DATASET_NAME).exists()
    assert len(read_documents(out)) == 3


def test_damage_is_found(source, tmp_path):
    out = tmp_path / "out"
    corpus, _ = build_corpus(out, sources=[source], vocab_size=VOCAB)
    data = out / f"{DATASET_NAME}.bin"
    os.truncate(data, 10)
    size = corpus.file_bytes[data.name]
    with pytest.raises(ConfigError, match=rf"\.bin has 10 bytes .* made with {size}: give --force"):
        build_corpus(out, sources=[source], vocab_size=VOCAB)
    (out / "corpus.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a record of this version: give --force"):
        build_corpus(out, sources=[source], vocab_size=VOCAB)


def test_files_that_are_not_text_are_counted_and_named(source, tmp_path):
    (source / "latin.txt").write_bytes("café".encode("latin-1"))
    (source / "wide.txt").write_bytes("text".encode("utf-16-le"))
    (source / "empty.txt").write_text(" \n")
    corpus, _ = build_corpus(tmp_path / "out", sources=[source], vocab_size=VOCAB)
    assert corpus.undecodable == [str(source / "latin.txt"), str(source / "wide.txt")]
    assert (corpus.files, corpus.documents, corpus.empty_documents) == (6, 3, 1)


def texts(*paths: Path, **settings) -> list[str]:
    return list(TextSources(list(paths), **settings).documents(Tally()))


def test_jsonl_lines_are_documents(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"body": "one"}\n\n{"body": "tw\\u00f6", "text": "no"}\n')
    assert texts(file, jsonl_key="body") == ["one", "twö"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"data\.jsonl, line 2 has no key 'text' \(its keys: body\).*--jsonl-key"),
        ('{"text": 3}', r"data\.jsonl, line 2: 'text' holds int, not text.*--jsonl-key"),
        ('["x"]', r"data\.jsonl, line 2 is not a JSON object"),
        ('{"text": ', r"data\.jsonl, line 2 is not JSON"),
    ],
)
def test_a_wrong_jsonl_line_is_named(tmp_path, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        texts(file)
    assert "\n" not in str(caught.value)


def test_each_file_is_read_once_in_sorted_order(source, tmp_path):
    (source / ".hidden").write_text("hidden")
    (source / "sub" / "loop").symlink_to(source)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "d.txt").write_text("linked")
    (source / "sub" / "link").symlink_to(elsewhere)
    found = TextSources([source, source / "b.txt", source / "sub"]).files
    names = [file.relative_to(source).as_posix() for file in found]
    assert names == ["a.md", "b.txt", "sub/c.txt", "sub/link/d.txt"]


def test_out_dir_inside_the_source_is_not_read(source):
    first, _ = build_corpus(source / "out", sources=[source], vocab_size=VOCAB)
    again, is_reused = build_corpus(source / "out", sources=[source], vocab_size=VOCAB)
    assert is_reused
    assert again.files == first.files == 3


def test_max_bytes_cuts_the_last_document_between_letters(tmp_path):
    (tmp_path / "a.txt").write_text("abc", encoding="utf-8")
    (tmp_path / "b.txt").write_text("éé", encoding="utf-8")
    for limit, expected in [(3, ["abc"]), (6, ["abc", "é"]), (7, ["abc", "éé"])]:
        tally = Tally()
        sources = TextSources([tmp_path], max_bytes=limit)
        assert list(sources.documents(tally)) == expected
        assert tally.truncated == (limit < 7)
        assert tally.text_bytes == len("".join(expected).encode())


def test_default_source_is_the_standard_library_without_tests(tmp_path):
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [file.relative_to(stdlib) for file in TextSources(None).files]
    assert Path("argparse.py") in files
    assert Path("json/decoder.py") in files
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    corpus, _ = build_corpus(tmp_path / "out", vocab_size=1024, max_bytes=300_000)
    assert corpus.truncated
    assert corpus.text_bytes == pytest.approx(300_000, abs=3)


def test_too_large_a_vocabulary_names_the_one_that_works(source, tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(ConfigError, match=r"--vocab-size 5000 is more than") as caught:
        build_corpus(out, sources=[source], vocab_size=5000)
    assert "\n" not in str(caught.value)
    # Nothing stays behind, not even a temporary folder.
    assert list(out.parent.iterdir()) == []
    supported = int(str(caught.value).split("give --vocab-size ")[1].split()[0])
    corpus, _ = build_corpus(out, sources=[source], vocab_size=supported)
    assert corpus.vocab_size == supported


def test_tokenizer_is_trained_on_an_even_sample_of_a_large_text(source, tmp_path, monkeypatch):
    for number in range(100):
        (source / f"{number:03}.txt").write_text(WORDS)
    monkeypatch.setattr(corpus_module, "_TOKENIZER_TEXT_BYTES", 5000)
    corpus, _ = build_corpus(tmp_path / "out", sources=[source], vocab_size=VOCAB)
    assert 3000 < corpus.tokenizer_bytes < 7000 < corpus.text_bytes
    assert len(read_documents(tmp_path / "out")) == 103


@pytest.mark.parametrize("when", ["training the tokenizer", "writing the dataset"])
def test_text_that_changes_meanwhile_is_noticed(source, tmp_path, when):
    def change(step: str, done: int, total: int) -> None:
        if step == when:
            (source / "sub" / "c.txt").write_text("changed")

    # Batches of one document, so that the last file is read after the first batch is written.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_ENCODE_BATCH_BYTES", 1)
        with pytest.raises(ConfigError, match="changed while being read"):
            build_corpus(tmp_path / "out", sources=[source], vocab_size=VOCAB, progress=change)
    assert not (tmp_path / "out").exists()


def test_wrong_use_is_one_line_with_the_remedy(source, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    blank = tmp_path / "blank.txt"
    blank.write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dangling.txt").symlink_to(tmp_path / "gone")
    cases = [
        ({"sources": [tmp_path / "gone"]}, r"--source .*gone: No such file.* give an existing"),
        ({"sources": [empty]}, r"no text files in .*empty: give --source"),
        ({"sources": [blank]}, r"no text in .*files read: 1.* empty documents: 1\): give"),
        ({"sources": [tmp_path / "pipe"]}, r"pipe is neither a file nor a folder"),
        ({"sources": [tmp_path / "broken"]}, r"cannot read .*dangling.txt: No such file"),
        ({"sources": [source], "vocab_size": 256}, r"--vocab-size 256 .* at least 257"),
        ({"sources": [source], "max_bytes": 0}, r"--max-bytes 0 leaves no text: give 1"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            build_corpus(tmp_path / "out", **settings)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        build_corpus(blank, sources=[source], vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=r"cannot write the corpus to .*blank\.txt"):
        build_corpus(blank / "out", sources=[source], vocab_size=VOCAB)


def dynmo_corpus(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["corpus", *map(str, argv)])
    return args.run(args)


def test_command_prints_the_flags_on_one_line(source, tmp_path, capsys):
    (source / "[bold]bad.bin").write_bytes(b"\xff")
    out = tmp_path / ("long name " * 12).strip()
    assert dynmo_corpus(out, "--source", source, "--vocab-size", VOCAB) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "Made: 3 documents" in printed.out
    assert f"Left out, not UTF-8 text: 1 of 4 files: {source}/[bold]bad.bin" in printed.out
    assert printed.out.splitlines()[-1] == (
        f"--data-path '{out}/{DATASET_NAME}' --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model '{out}/tokenizer' --vocab-size {VOCAB}"
    )
    assert dynmo_corpus(out, "--source", source, "--vocab-size", VOCAB) == 0
    assert "Already there, unchanged: 3 documents" in capsys.readouterr().out


def test_command_json_is_the_record_and_whether_it_was_there(source, tmp_path, capsys):
    out = tmp_path / "out"
    for status in ("built", "reused"):
        argv = (out, "--source", source / "a.md", "--source", source / "b.txt", "--json")
        assert dynmo_corpus(*argv, "--vocab-size", VOCAB) == 0
        printed = json.loads(capsys.readouterr().out)
        record = json.loads((out / "corpus.json").read_text())
        assert printed == {"status": status, **record}
        assert record["sources"] == [str(source / "a.md"), str(source / "b.txt")]
