"""The pure heart: no I/O, no clock, no randomness unless it is passed in."""
