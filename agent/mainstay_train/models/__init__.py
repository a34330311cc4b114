"""Models that come with Mainstay; each module offers an entrypoint ``workload``."""
