"""Commands on a login node, and the local record of the runs that they made there."""
