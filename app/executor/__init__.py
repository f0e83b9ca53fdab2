"""From a leased run to its settled outcome: delivery, its guard, and the workers that drive both."""
