"""Claims by hint: `SCHEDULER_CLAIM_MODE=kafka`. Kafka carries hints, PostgreSQL is the truth: losing every hint costs
lateness (the grace), never a run. The only package that knows aiokafka."""
