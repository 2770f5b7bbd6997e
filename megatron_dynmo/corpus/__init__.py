"""A Megatron dataset and a tokenizer from any text."""

from megatron_dynmo.corpus.build import (
    DATASET_NAME,
    END_OF_DOCUMENT,
    Corpus,
    ProgressCallback,
    build_corpus,
)

__all__ = ["DATASET_NAME", "END_OF_DOCUMENT", "Corpus", "ProgressCallback", "build_corpus"]
