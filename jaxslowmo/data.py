"""Batches of text, for `import jaxslowmo.data`."""

from .language._data import TextBatches as TextBatches
from .language._data import TextSplit as TextSplit
from .language._data import split_corpus as split_corpus
from .language._data import validation_batches as validation_batches
from .language._data import Corpus as Corpus
from .language._data import Document as Document
from .language._data import default_corpus_path as default_corpus_path
from .language._data import read_corpus as read_corpus
