"""One file per scenario: what `carillon load NAME` does."""
