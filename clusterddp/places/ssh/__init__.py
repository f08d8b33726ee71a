"""Runs on hosts over SSH: the connections, the uploads and downloads, the launcher; paramiko is here only."""
