"""The rebalancing report for people and programs: gathered from a running gateway, written as JSON, CSV and HTML."""
