"""From schedules to runs: every replica, every second, without a leader."""
