"""The REST API under /v1, the probes and the metrics. The only home of fastapi."""
