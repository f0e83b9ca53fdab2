"""The only SQL and the only asyncpg: every statement is a constant right above the one function that runs
it."""
