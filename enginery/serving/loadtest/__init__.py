"""Load on a model server, and what it does to throughput and latency."""
