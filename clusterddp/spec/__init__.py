"""The YAML spec: from text to a checked `JobSpec`, with the place of every value for error messages.

textfile, yamlfile                   text -> a tree of nodes with their places (tree.py); nothing is typed yet
overrides, profiles, hosts, hostfile what arguments, variables, profiles and hostfiles merge into that tree
shared, base                         the project file and the site file; what a spec is laid over
keys                                 one spelling for each key; suggestions for unknown keys
model, *_section, fields, scalars    each key: its type, range, default and description
rules                                values that conflict; the rules within a section are below its keys
check                                tree -> JobSpec, or problems (problems.py), each at its place
load, sweep                          all of this, for one run or for many
write                                JobSpec -> YAML that reads back equal

To add a key, add a field to its section and, below the section, its rules. Schema, help of editors and docs are
generated from the field. The section `train` is a dataclass (train.py, its rules in train_rules.py), which hosts read
without pydantic.
"""
