"""The YAML spec: strict reading, overrides, profiles, and the model that types it."""
