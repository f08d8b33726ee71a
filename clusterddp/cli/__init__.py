"""The command `clusterddp`: what people type, what they see, and the exit codes that scripts rely on.

Modules here import click and nothing heavier; what a command needs is imported when it runs.
"""
