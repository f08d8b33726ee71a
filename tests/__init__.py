"""The tests, by how much machine they need: unit/, process/, rack/. What they share: support/, testbed/."""
