"""Which sample is number i: positions only, never data."""

from penstock.order.mix import Pattern, build_pattern
from penstock.order.natural import Natural
from penstock.order.permute import Permutation, permutation
from penstock.order.pool import Pool, blocks_for, pool
from penstock.order.schedule import ORDER_VERSION, Draw, Order, Stretch
from penstock.order.sharding import register_sharding
from penstock.order.split import Cut, share

__all__ = [
    "ORDER_VERSION",
    "Cut",
    "Draw",
    "Natural",
    "Order",
    "Pattern",
    "Permutation",
    "Pool",
    "Stretch",
    "blocks_for",
    "build_pattern",
    "permutation",
    "pool",
    "register_sharding",
    "share",
]
