"""Batches of text, for `import jaxslowmo.data`."""

from .language.data import Corpus as Corpus
from .language.data import Document as Document
from .language.data import TextBatches as TextBatches
from .language.data import TextSplit as TextSplit
from .language.data import default_corpus_path as default_corpus_path
from .language.data import read_corpus as read_corpus
from .language.data import split_corpus as split_corpus
from .language.data import validation_batches as validation_batches
