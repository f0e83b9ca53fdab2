"""How due runs reach this replica, and how their leases are kept: strategy, ring, keeper, reaper."""
