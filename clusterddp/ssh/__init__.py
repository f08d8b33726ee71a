"""The way to a host by SSH: connections that are checked, many at once, as the user's own ssh would make them."""
