"""Downloads the files of remote runs and keeps the local copies up to date."""
