"""Host input: real text as bytes, one disjoint share per replica, in numpy."""

from ._corpus import Contents as Contents
from ._corpus import Corpus as Corpus
from ._corpus import Document as Document
from ._corpus import default_corpus_path as default_corpus_path
from ._corpus import read_corpus as read_corpus
from ._split import TextSplit as TextSplit
from ._split import split_corpus as split_corpus
from ._windows import TextBatches as TextBatches
from ._windows import validation_batches as validation_batches
