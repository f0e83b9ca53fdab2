"""What Carillon starts by itself: an embedded PostgreSQL, an echoing receiver and child processes.

Serves `carillon dev`, `carillon load` and the tests. Nothing here knows anything of schedules or runs.
"""
