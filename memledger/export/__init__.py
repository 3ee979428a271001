"""The ledger as Prometheus metrics: sampled in the background, rendered once per sample, served as it stands."""
