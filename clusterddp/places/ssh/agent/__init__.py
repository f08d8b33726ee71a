"""The agent: answers on a host, at the other end of an SSH connection; needs Python and no other package."""
