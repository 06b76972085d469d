"""Named plug-ins: a registry that decorators fill and that answers an unknown name with the names it knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from penstock.errors import SpecError
from penstock.spec import suggest

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """What is registered for one kind of plug-in. A later registration of a name replaces the earlier one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}

    def add(self, name: str, plugin: T) -> T:
        self._known[name] = plugin
        return plugin

    def get(self, name: str) -> T:
        try:
            return self._known[name]
        except KeyError:
            near = suggest(name, self._known)
            raise SpecError(
                f"no {self.kind} named {name!r}",
                known=", ".join(sorted(self._known)),
                remedy=f"{near!r}" if near else f"one of the known names, or register a {self.kind} of your own",
            ) from None

    def values(self) -> Iterator[T]:
        return iter(self._known.values())

    def __contains__(self, name: str) -> bool:
        return name in self._known
