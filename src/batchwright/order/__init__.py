"""The order of samples: positions only, never data."""

from batchwright.order.mix import Pattern, build_pattern
from batchwright.order.natural import Natural
from batchwright.order.permute import Permutation, permutation
from batchwright.order.schedule import ORDER_VERSION, Draw, Order, Stretch
from batchwright.order.sharding import register_sharding
from batchwright.order.split import Cut, share
from batchwright.order.windows import WindowShuffle, blocks_for, window_shuffle

__all__ = [
    "ORDER_VERSION",
    "Cut",
    "Draw",
    "Natural",
    "Order",
    "Pattern",
    "Permutation",
    "Stretch",
    "WindowShuffle",
    "blocks_for",
    "build_pattern",
    "permutation",
    "register_sharding",
    "share",
    "window_shuffle",
]
