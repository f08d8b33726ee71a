"""The command `clusterddp`: its arguments, its output, and its exit codes.

Modules here import click and nothing heavier; what a command needs is imported when it runs.
"""
