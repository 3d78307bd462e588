"""What asv runs: benchmarks over all records, so that a mechanism that joins the registry is measured by itself."""
