"""Rows -> samples: the user's own functions, tokenizers, and the documents to hold out.

Conversations have a folder of their own, `chat/`. Its function `chat` is in `chat/step.py`: imported here, it would
hide the folder.
"""

from batchwright.prepare.rows import RowStep, row_step, side_of
from batchwright.prepare.tokenize import Tokenize, tokenize
from batchwright.prepare.tokenizers import load_tokenizer, resolve_tokenizer

__all__ = ["RowStep", "Tokenize", "load_tokenizer", "resolve_tokenizer", "row_step", "side_of", "tokenize"]
