"""Which group is used when each is used several times: rounds of groups, and several passes over each round.

The first pass of a round goes in the order of the journal, as groups come in; each later one in an order of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.order.permute import permutation

__all__ = ["Uses"]


class Uses(NamedTuple):
    """`passes` over each round of `round_groups` groups. With one pass, use number n is group number n."""

    passes: int
    round_groups: int
    seed: int

    def groups_needed(self, last_use: int, last_group: int | None = None) -> int:
        """How many groups must be there, so that uses [0, last_use) are known.

        `last_group` is how many there will ever be, once that is known: the last round may be a short one.

        >>> [Uses(2, 3, 0).groups_needed(n) for n in (1, 3, 4, 6, 7)]
        [1, 3, 3, 3, 4]
        >>> Uses(2, 3, 0).groups_needed(8, last_group=4)
        4
        """
        round_uses = self.passes * self.round_groups
        whole, left = divmod(last_use, round_uses)
        needed = whole * self.round_groups + min(left, self.round_groups)
        return needed if last_group is None else min(needed, last_group)

    def known(self, num_groups: int, is_last: bool) -> int:
        """How many uses are known when so many groups are there; `is_last` where there will be no more.

        >>> [Uses(2, 3, 0).known(n, False) for n in (1, 3, 4)], Uses(2, 3, 0).known(4, True)
        ([1, 6, 7], 8)
        """
        whole, left = divmod(num_groups, self.round_groups)
        return whole * self.round_groups * self.passes + left * (self.passes if is_last else 1)

    def at(self, use: NDArray[np.int64], last_group: int | None = None) -> NDArray[np.int64]:
        """The number of the group that each use is of.

        >>> Uses(2, 3, 0).at(np.arange(12)).tolist()
        [0, 1, 2, 1, 0, 2, 3, 4, 5, 4, 5, 3]
        """
        if self.passes == 1:
            return use
        round_uses = self.passes * self.round_groups
        number = use // round_uses
        group = np.empty_like(use)
        for which in np.unique(number).tolist():
            mine = np.flatnonzero(number == which)
            begin = which * self.round_groups
            width = self.round_groups if last_group is None else min(self.round_groups, last_group - begin)
            in_round = use[mine] - which * round_uses
            for each in np.unique(in_round // width).tolist():
                here = mine[in_round // width == each]
                place = in_round[in_round // width == each] - each * width
                moved = place if not each else permutation(width, self.seed, "uses", which, each).at(place)
                group[here] = begin + moved
        return group
