"""Telemetry of a run: metrics, events, anomalies and charts."""
