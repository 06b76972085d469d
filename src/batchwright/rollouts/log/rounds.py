"""The order in which groups are used several times: rounds of groups, and several passes over each round.

The first pass of a round is in the order of the journal, as groups come in. Each later pass has an order of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.order.permute import permutation
from batchwright.rollouts.log.ledger import Begin

__all__ = ["Rounds", "rounds_of"]


class Rounds(NamedTuple):
    """`passes` over each round of `round_groups` groups. With one pass, use number n is group number n.

    `last_group` is the final number of groups, once it is known. The last round may be short.
    """

    passes: int
    round_groups: int
    seed: int

    def groups_needed(self, last_use: int, last_group: int | None = None) -> int:
        """The number of groups that must be there before uses [0, last_use) are known.

        >>> [Rounds(2, 3, 0).groups_needed(n) for n in (1, 3, 4, 6, 7)]
        [1, 3, 3, 3, 4]
        >>> Rounds(2, 3, 0).groups_needed(8, last_group=4)
        4
        """
        full, left = divmod(last_use, self.passes * self.round_groups)
        needed = full * self.round_groups + min(left, self.round_groups)
        if last_group is None:
            return needed
        return min(needed, last_group)

    def num_uses(self, num_groups: int, is_last: bool) -> int:
        """The number of uses that are known once `num_groups` are there. `is_last`: no group will follow.

        >>> [Rounds(2, 3, 0).num_uses(n, False) for n in (1, 3, 4)], Rounds(2, 3, 0).num_uses(4, True)
        ([1, 6, 7], 8)
        """
        if is_last:
            return num_groups * self.passes
        full, left = divmod(num_groups, self.round_groups)
        return full * self.round_groups * self.passes + left

    def group_of(self, use: NDArray[np.int64], last_group: int | None = None) -> NDArray[np.int64]:
        """The number of the group of each use.

        >>> Rounds(2, 3, 0).group_of(np.arange(12)).tolist()
        [0, 1, 2, 1, 0, 2, 3, 4, 5, 4, 5, 3]
        """
        if self.passes == 1:
            return use
        round_uses = self.passes * self.round_groups
        number, in_round = np.divmod(use, round_uses)
        group = np.empty_like(use)
        for each in np.unique(number).tolist():
            begin = each * self.round_groups
            width = self.round_groups
            if last_group is not None:
                width = min(width, last_group - begin)
            mine = np.flatnonzero(number == each)
            passes, places = np.divmod(in_round[mine], width)
            for later in np.unique(passes[passes > 0]).tolist():
                now = passes == later
                places[now] = permutation(width, self.seed, "uses", each, later).at(places[now])
            group[mine] = begin + places
        return group


def rounds_of(begin: Begin) -> Rounds:
    """The rounds of a log, by its first event."""
    return Rounds(begin.samples_per_insert, begin.round_groups or 1, begin.seed)
