"""The parameters format=, columns= and roles=, checked: the layout that a user gives instead of having it detected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.base.checks import one_of
from batchwright.base.errors import SpecError
from batchwright.base.words import suggest
from batchwright.prepare.chat.formats import FORMATS, TURN_FIELDS, Layout
from batchwright.prepare.chat.messages import LIKELY_ROLES, ROLES

__all__ = ["layout_of"]


def layout_of(
    format: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Layout | None:
    """The layout that a user gave, or None if it must be detected.

    >>> print(layout_of("messages", {"messages": "dialog", "role": "speaker"}))
    messages: messages in 'dialog' (speaker, content)
    >>> print(layout_of(columns={"prompt": "question", "completion": "answer"}))
    prompt_completion: 'question' and 'answer'

    `columns` is {the format's name: the rows' name}; None leaves an optional column out. `roles` is
    {the rows' name of a role: system, developer, user, assistant or tool}.
    """
    columns = _mapping("columns", columns, "columns={'messages': 'dialog'}")
    roles = _mapping("roles", roles, "roles={'bot': 'assistant'}")
    for given, role in roles.items():
        _check_role(given, role)
    if format is not None:
        one_of(FORMATS, format=format)
    _check_names(columns, format)
    if format is None:
        if not columns and not roles:
            return None
        format = _format_with(columns)
    for name, column in columns.items():
        _check_column(format, name, column)
    layout = Layout.of(format, columns, roles.items())
    if len(set(layout.main)) < len(layout.main):
        raise SpecError(
            f"columns= takes {' and '.join(FORMATS[format].main)} from one column, {layout.main[0]!r}",
            parameter="columns",
            remedy="a column for each",
        )
    return layout


def _mapping(parameter: str, given: Any, remedy: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SpecError(f"{parameter}={given!r} is not a mapping", parameter=parameter, remedy=remedy)
    return given


def _check_role(given: Any, role: Any) -> None:
    if isinstance(given, str) and role in ROLES:
        return
    near = suggest(str(role), ROLES) or LIKELY_ROLES.get(str(role))
    raise SpecError(
        f"roles={{{given!r}: {role!r}}}: {role!r} is not a role",
        parameter="roles",
        known=", ".join(ROLES),
        remedy=f"{{{given!r}: {near if near in ROLES else 'assistant'!r}}}",
    )


def _check_names(columns: Mapping[str, Any], format: str | None) -> None:
    formats = list(FORMATS) if format is None else [format]
    known = dict.fromkeys(name for each in formats for name in FORMATS[each].names)
    for name in columns:
        if name not in known:
            which = "no format has" if format is None else f"format {format!r} does not have"
            raise SpecError(
                f"columns= names {name!r}, which {which}",
                parameter="columns",
                known=", ".join(known),
                remedy=repr(suggest(name, known) or "first what the format calls it, then what your rows call it"),
            )


def _format_with(columns: Mapping[str, Any]) -> str:
    """The one format that has all of these names."""
    if not columns:
        raise SpecError(
            "roles= without format=: which roles there are depends on the format",
            parameter="format",
            known=", ".join(FORMATS),
            remedy="format='messages', or another of them",
        )
    fit = [format for format, its in FORMATS.items() if columns.keys() <= {*its.names}]
    if len(fit) == 1:
        return fit[0]
    raise SpecError(
        f"columns= fits {' and '.join(fit)}" if fit else "columns= has names of several formats",
        parameter="format",
        known=", ".join(FORMATS),
        remedy=f"format={[*fit, 'messages'][0]!r}, or another of them",
    )


def _check_column(format: str, name: str, column: Any) -> None:
    is_needed = name in FORMATS[format].main or name in TURN_FIELDS
    if column is None and not is_needed:
        return
    if not isinstance(column, str) or not column:
        raise SpecError(
            f"columns={{{name!r}: {column!r}}} names no column",
            parameter="columns",
            remedy=f"{{{name!r}: 'its name in your rows'}}",
        )
