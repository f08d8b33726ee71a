"""This machine: processes, file locks, GPU leases, storage, devices."""
