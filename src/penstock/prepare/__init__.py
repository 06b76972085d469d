"""Rows -> samples: the user's own functions, tokenizers, and which documents are held out."""

from penstock.prepare.chat.step import Chat, chat
from penstock.prepare.holdout import side_of
from penstock.prepare.rows import RowStep, row_step
from penstock.prepare.tokenize import Tokenize, tokenize
from penstock.prepare.tokenizers import load_tokenizer, resolve_tokenizer

__all__ = [
    "Chat",
    "RowStep",
    "Tokenize",
    "chat",
    "load_tokenizer",
    "resolve_tokenizer",
    "row_step",
    "side_of",
    "tokenize",
]
