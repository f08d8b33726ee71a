"""Programs that ranks, or a host, execute before a run: they measure and prove what training depends on."""
