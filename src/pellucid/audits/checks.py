"""The table of checks, in the order in which they run."""

from pellucid.audits import batch, cache, future, loss, packing, padding, trace
from pellucid.audits.check import Check

CHECKS: dict[str, Check] = {
    module.CHECK.name: module.CHECK for module in (future, padding, packing, batch, loss, cache, trace)
}
