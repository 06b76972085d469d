"""The first conversations of raw files, rendered and encoded without a bake, and the faults in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchwright.baking import DatasetRecipe
from batchwright.baking.inputs import Inputs
from batchwright.baking.work import Work, plan_work
from batchwright.base.checks import local_path
from batchwright.base.errors import SpecError, TokenizerError
from batchwright.base.words import counted
from batchwright.loaders.chat_checks import CheckSettings, ConversationRows, Finding, facts_of, findings_of
from batchwright.loaders.planning import pad_token_of
from batchwright.prepare.chat.formats import detect
from batchwright.prepare.chat.messages import ChatError
from batchwright.prepare.chat.spans import Encoded
from batchwright.prepare.chat.step import Chat, Prepared
from batchwright.prepare.documents import read_documents
from batchwright.sources.formats import Malformed
from batchwright.sources.units import EndOfSpan, place
from batchwright.store.layout import is_store

__all__ = ["ChatFile"]

_MOST_EXAMPLES = 3
_GIVE_UP_AFTER = 100
"""Rows that all fail in the same way: the rest would too."""

Place = dict[str, Any]


class ChatFile:
    """The check of raw files: call `read`, then `encode`, then `findings`."""

    def __init__(self, step: Chat) -> None:
        self.step: Chat = step
        """It knows its format as soon as a row has told."""
        self.num_rows: int = 0
        self.is_all: bool = True
        """Whether all rows were read."""
        self.prepared: list[Prepared] = []
        self.places: list[Place] = []
        """The place of each prepared row."""
        self.encoded: list[Encoded] = []
        self._faults: dict[str, list[tuple[Place, str, str]]] = {}
        """By kind: (where, reason, remedy) of rows that cannot be used."""

    @property
    def has_pairs(self) -> bool:
        return any(one.spans["side"].any() for one in self.encoded)

    def read(self, paths: Sequence[str], most_rows: int) -> None:
        """Render the first rows of some files. Unusable rows are kept with the reason."""
        if is_store(local_path(file=paths[0])):
            what = f"{paths[0]} is a store, and this looks at raw conversations"
            remedy = "the files that it was baked from; ConversationDataLoader checks a store when it opens it"
            raise SpecError(what, parameter="FILE", remedy=remedy)
        source = list(paths) if len(paths) > 1 else paths[0]
        recipe = DatasetRecipe().add_ingredient(source, name="conversations").prepare_step(self.step)
        (work,) = plan_work(recipe, Inputs.of(recipe, shuffle=False), "skip", shuffle=False)
        for where, row in _rows(work):
            if self.num_rows == most_rows or self._is_hopeless():
                break
            self.num_rows += 1
            self._read_row(where, row)
        self.is_all = self.num_rows < most_rows and not self._is_hopeless()
        if not self.num_rows:
            raise SpecError("there are no rows to check", parameter="FILE", remedy="a file with a conversation in it")

    def _read_row(self, where: Place, row: Any) -> None:
        if isinstance(row, Malformed):
            self._refuse(row.kind, where, row.reason, row.remedy)
            return
        try:
            if self.step.layout is None:
                self.step = replace(self.step, layout=detect(row))
            prepared = self.step.prepare(row)
        except ChatError as error:
            if error.turn is not None:
                where = where | {"turn": error.turn}
            self._refuse(error.kind, where, error.reason, error.remedy)
            return
        self.prepared.append(prepared)
        self.places.append(where)

    def _refuse(self, kind: str, where: Place, reason: str, remedy: str) -> None:
        self._faults.setdefault(kind, []).append((where, reason, remedy))

    def _is_hopeless(self) -> bool:
        return not self.prepared and any(len(faults) >= _GIVE_UP_AFTER for faults in self._faults.values())

    def encode(self) -> None:
        """Compute tokens and spans. Rows that the tokenizer refuses are moved to the faults."""
        while self.prepared:
            try:
                self.encoded = self.step.encode(self.prepared)
                return
            except TokenizerError as error:
                if "number" not in error.where:
                    raise
                number = int(error.where["number"])  # type: ignore[call-overload]
                self.prepared.pop(number)
                self._refuse("cannot be encoded", self.places.pop(number), error.headline, error.remedy or "")

    def findings(self, settings: CheckSettings) -> list[Finding]:
        """All findings, failures first."""
        found = list(self._refused_rows())
        if self.step.layout is not None:
            found.append(Finding("format", False, str(self.step.layout)))
        if self.encoded:
            info, tokenizer = self.step.info(), self.step.tokenizer
            try:
                settings = replace(settings, pad=pad_token_of(info, getattr(tokenizer, "vocab", {}), None))
            except SpecError as error:
                found.append(Finding("no pad", False, error.headline, remedy=error.remedy or ""))
            found += findings_of(self._as_rows(), facts_of(info, tokenizer), settings)
            found += [*self._names_in_messages(), *self._tools_not_written()]
        return sorted(found, key=lambda finding: not finding.is_failure)

    def _as_rows(self) -> ConversationRows:
        spans = np.concatenate([one.spans for one in self.encoded])
        return ConversationRows(
            np.concatenate([one.tokens for one in self.encoded]),
            np.cumsum([0, *(len(one.tokens) for one in self.encoded)], dtype=np.int64),
            np.cumsum([0, *(len(one.spans) for one in self.encoded)], dtype=np.int64),
            {name: spans[name] for name in spans.dtype.names or ()},
            lambda number: dict(self.places[number]),
        )

    # Findings that need rows, not only tokens

    def _refused_rows(self) -> Iterator[Finding]:
        """Find rows that a bake would refuse: one finding for each kind, with a few examples."""
        for kind, faults in self._faults.items():
            examples = tuple(where | ({"why": why} if why else {}) for where, why, _ in faults[:_MOST_EXAMPLES])
            remedies = [remedy for _, _, remedy in faults if remedy]
            remedies.append("mend these rows, or on_error='skip' leaves them out")
            share = f"{len(faults):,} of {counted(self.num_rows, 'row')} cannot be used"
            yield Finding(kind, True, share, examples, remedies[0])

    def _names_in_messages(self) -> Iterator[Finding]:
        """Find names of special tokens inside messages: text that was already rendered, or a user's words."""
        names = {*getattr(self.step.tokenizer, "special", ()), self.step.template.end_of_turn or ""}
        known = [re.escape(name) for name in sorted(names, key=len, reverse=True) if len(name) > 2]
        pattern = re.compile("|".join(known) or "(?!)")
        first: list[str] = []

        def turn_with_name(one: Prepared) -> Place | None:
            for conversation in one.conversations:
                for turn, message in enumerate(conversation["messages"]):
                    if found := pattern.search(message["content"]):
                        first.append(found[0])
                        return {"turn": turn}
            return None

        places = self._places_where(turn_with_name)
        if places:
            words = f"have the name of a special token in a message, such as {first[0]}: it is encoded as plain text"
            remedy = "if these texts were rendered by a template before, start from the conversations"
            yield self._note("marker in a message", words, places, remedy)

    def _tools_not_written(self) -> Iterator[Finding]:
        """Find tools that a template does not write. This is silent if no message of the row calls one."""

        def is_silent(one: Prepared) -> Place | None:
            for conversation, side in zip(one.conversations, one.sides, strict=True):
                if any(name not in side.text for name in _tool_names(conversation)):
                    return {}
            return None

        places = self._places_where(is_silent)
        if places:
            name = self.step.template.name
            words = f"have tools that the template {name!r} does not write: a model would not be told of them"
            remedy = "a template that writes tools: the tokenizer's own, 'qwen' or 'mistral'"
            yield self._note("tools are not written", words, places, remedy)

    def _places_where(self, look: Callable[[Prepared], Place | None]) -> list[Place]:
        found = zip(self.places, map(look, self.prepared), strict=True)
        return [where | more for where, more in found if more is not None]

    def _note(self, kind: str, words: str, places: list[Place], remedy: str) -> Finding:
        headline = f"{len(places):,} of {counted(len(self.prepared), 'row')} {words}"
        return Finding(kind, False, headline, tuple(places[:_MOST_EXAMPLES]), remedy)


def _rows(work: Work) -> Iterator[tuple[Place, Any]]:
    """(place, the row or the reason why there is none)."""
    for unit in work.units:
        first: dict[int, Place] = {}
        for span, number, text, row in read_documents(unit, work.job.formats, None, None):
            if isinstance(text, EndOfSpan):
                continue
            base = first.setdefault(span, place(unit, span, 0, work.job.formats))
            where = {name: value + number if name in ("line", "row") else value for name, value in base.items()}
            yield where, text if isinstance(text, Malformed) else row


def _tool_names(conversation: dict[str, Any]) -> Iterator[str]:
    for tool in conversation.get("tools") or ():
        definition = tool.get("function")
        name = (definition if isinstance(definition, dict) else tool).get("name")
        if isinstance(name, str):
            yield name
