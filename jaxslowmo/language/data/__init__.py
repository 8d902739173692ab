"""Host input in NumPy: real text as bytes, with one disjoint share per replica."""

from ._batches import TextBatches as TextBatches
from ._batches import TextSplit as TextSplit
from ._batches import split_corpus as split_corpus
from ._batches import validation_batches as validation_batches
from ._corpus import Corpus as Corpus
from ._corpus import Document as Document
from ._corpus import default_corpus_path as default_corpus_path
from ._corpus import read_corpus as read_corpus
