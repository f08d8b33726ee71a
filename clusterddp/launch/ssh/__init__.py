"""The ssh launcher: a run on hosts that are reached by SSH, from the files that go there to those that come home."""
