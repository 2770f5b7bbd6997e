"""Megatron's own reader, tokenizer and GPT dataset take what `dynmo corpus` makes."""

import json
import socket
import sys

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import parse_args

from megatron_dynmo.corpus import END_OF_DOCUMENT, Corpus, build_corpus
from megatron_dynmo.corpus.indexed_dataset import token_dtype, write_indexed_dataset

VOCAB = 1000


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus") / "out"


@pytest.fixture(scope="module")
def corpus(out_dir) -> Corpus:
    return build_corpus(out_dir, vocab_size=VOCAB, max_bytes=200_000)[0]


@pytest.fixture
def megatron_args(corpus, monkeypatch):
    """The flags of corpus.json, through Megatron's own parser, with the network cut off."""

    attempts = []

    def refuse(*args: object) -> None:
        attempts.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *corpus.megatron_args])
    args = parse_args()
    args.rank = 0
    yield args
    assert attempts == []


@pytest.mark.parametrize("vocab_size", [4096, 65499, 65500, 100_000])
def test_dataset_files_are_those_of_megatrons_builder(tmp_path, vocab_size):
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, vocab_size, size).tolist() for size in (5, 1, 300, 17)]
    num_tokens = write_indexed_dataset(tmp_path / "ours", documents, vocab_size=vocab_size)
    assert num_tokens == 323

    dtype = DType.optimal_dtype(vocab_size)
    assert np.dtype(token_dtype(vocab_size)) == dtype
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        ours = (tmp_path / f"ours{ending}").read_bytes()
        assert ours == (tmp_path / f"theirs{ending}").read_bytes()


def test_tokenizer_and_documents_agree(corpus, megatron_args):
    tokenizer = build_tokenizer(megatron_args)
    assert tokenizer.vocab_size == VOCAB == megatron_args.vocab_size
    # Megatron pads the embedding to a multiple of 128.
    assert megatron_args.padded_vocab_size == 1024
    assert tokenizer.detokenize([tokenizer.eod]) == END_OF_DOCUMENT

    dataset = IndexedDataset(megatron_args.data_path[0])
    assert len(dataset) == corpus.documents
    assert dataset.document_indices.tolist() == list(range(corpus.documents + 1))
    assert int(dataset.sequence_lengths.sum()) == corpus.tokens
    text_bytes = 0
    for document in dataset:
        assert document[-1] == tokenizer.eod
        text = tokenizer.detokenize(document[:-1].tolist())
        assert tokenizer.tokenize(text) == document[:-1].tolist()
        text_bytes += len(text.encode())
    assert text_bytes == corpus.text_bytes


def test_gpt_dataset_serves_samples(corpus, megatron_args, out_dir):
    sequence_length = 128
    path = megatron_args.data_path[0]
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=sequence_length,
        blend=([path], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        tokenizer=build_tokenizer(megatron_args),
    )
    indexed = GPTDataset.build_low_level_dataset(path, config)
    samples = GPTDataset(
        indexed, path, np.arange(corpus.documents, dtype=np.int32), None, Split.train, config
    )
    assert len(samples) == (corpus.tokens - 1) // sequence_length
    seen = set()
    for sample in (samples[index] for index in range(len(samples))):
        assert sample["tokens"].shape == sample["labels"].shape == (sequence_length,)
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        seen.update(sample["tokens"].tolist())
        is_end = sample["tokens"] == config.tokenizer.eod
        assert torch.equal(sample["loss_mask"] == 0, is_end)
    assert max(seen) < VOCAB
    assert config.tokenizer.eod in seen

    # Megatron's index beside the data neither hides the corpus nor outlives it.
    assert (out_dir / "corpus_text_document" / "cache").is_dir()
    assert build_corpus(out_dir, vocab_size=VOCAB, max_bytes=200_000)[1]
    build_corpus(out_dir, vocab_size=VOCAB, max_bytes=200_000, force=True)
    assert not (out_dir / "corpus_text_document").exists()
    assert json.loads((out_dir / "corpus.json").read_text())["tokens"] == corpus.tokens
