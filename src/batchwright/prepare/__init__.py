"""Rows -> samples: the user's own functions, tokenizers, and which documents are held out.

Conversations have a folder of their own, `chat/`: the function `chat` is in its `step`, and would hide the folder here.
"""

from batchwright.prepare.holdout import side_of
from batchwright.prepare.rows import RowStep, row_step
from batchwright.prepare.tokenize import Tokenize, tokenize
from batchwright.prepare.tokenizers import load_tokenizer, resolve_tokenizer

__all__ = [
    "RowStep",
    "Tokenize",
    "load_tokenizer",
    "resolve_tokenizer",
    "row_step",
    "side_of",
    "tokenize",
]
