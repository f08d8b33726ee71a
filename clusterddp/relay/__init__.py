"""Relay: copies the metrics, the configuration and the end of a run to an experiment tracker."""
